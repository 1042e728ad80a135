"""How claims of ``etcd://`` leave a name, and how whoever is next gets it.

A waiter behind another waiter does not watch it from the start: who is granted after a wait reads
along who comes next, and its release hands the name over to that one and writes its subscription,
a key
that its client watches all the time. The heir makes sure with a linearizable read. It says in its
entry that it came only if it holds for longer than a moment (``etcd_renew``); if it did not come,
others take its place from it as from any waiter that is let in and does not come.

Whatever leaves the line without calling (a lease that ran out) is noticed by the watch that every
wait begins a moment later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.claim import Claim, Grant
from holdfast.core.contract import DIRECT_GRANT_SECONDS
from holdfast.core.hold import certain_seconds
from holdfast.core.ordered import Entry
from holdfast.errors import BackendUnavailable
from holdfast.stores._consensus.sessions import Session
from holdfast.stores.etcd import requests
from holdfast.stores.etcd.gateway import NoSpace, SessionGone
from holdfast.stores.etcd.session import SOMEBODY, TXN, Heir, Ref

if TYPE_CHECKING:
    from holdfast.stores.etcd.backend import EtcdBackend

__all__ = ["abandon", "call_first", "handed_to", "heir_of", "release", "skip"]

LINED_SECONDS = 0.05
"""For how long whoever was handed a name is taken to be still there, which saves asking."""
DELETE = b"POST /v3/kv/deleterange"
RANGE = b"POST /v3/kv/range"


def heir_of(found: Sequence[dict[str, str]]) -> Heir | None:
    """Who comes next, by what was found behind a claim."""
    for kv in found:
        if requests.is_writer(kv["key"]):
            changed, session = int(kv["mod_revision"]), kv.get("lease", "0")
            return Heir(kv["key"], kv.get("value", ""), changed, session)
    return None


async def release(backend: EtcdBackend, grant: Grant) -> bool:
    store, claim, (key, order, _, heir) = backend.store, grant.claim, Ref(*grant.ref)
    store.places.pop(claim.owner, None)
    store.handed.discard(claim.owner)
    if not store.tags.has(claim):
        return await _end_again(backend, grant)
    sure = claim.owner not in store.sessions.doubts
    ours = sure and heir is not None and await _hand_over(backend, grant, heir)
    if not ours:
        ours = await _delete(backend, claim, key.encode(), None if heir is None else order)
    if ours and sure:
        store.tags.free(claim)
    else:
        store.tags.retire(claim)
    return ours


async def _end_again(backend: EtcdBackend, grant: Grant) -> bool:
    """Ends a hold that has ended before, as far as we know: its key may be another's by now."""
    ref = Ref(*grant.ref)
    body = requests.txn([ref.stands()], [requests.delete(ref.key.encode())])
    return bool((await backend.gateway.post(TXN, body)).get("succeeded"))


async def _hand_over(backend: EtcdBackend, grant: Grant, heir: Heir) -> bool:
    """Ends a hold and gives the name to its heir, if it is still ours and the heir still waits."""
    if heir == SOMEBODY:
        return False
    try:
        answer = await backend.gateway.post(TXN, _handing(backend, grant, heir))
    except (SessionGone, NoSpace, ValueError):
        return False  # its lease ended, it can't be told, or its entry is of another version
    if not answer.get("succeeded"):
        return False
    # Who comes back at once finds it there.
    keys = backend.store.names.of(grant.claim.name)
    keys.lined_until = backend.runtime.now() + LINED_SECONDS
    return True


def _handing(backend: EtcdBackend, grant: Grant, heir: Heir) -> bytes:
    ref, next_key = Ref(*grant.ref), heir.key.encode()
    subscription = backend.store.names.subscription(heir.session)
    return requests.txn(
        [ref.stands(), requests.changed_at(next_key, heir.changed)],
        [
            requests.delete(ref.key.encode()),
            requests.change(next_key, requests.handed_value(heir.value)),
            requests.wake(subscription, requests.tag_of(heir.key), heir.session),
        ],
    )


async def handed_to(backend: EtcdBackend, claim: Claim, until: float) -> Grant | None:
    """What was handed over to a claim that was called, by a linearizable read; it is for as long
    as nobody can have lost patience, and for the time that its lease has left."""
    store = backend.store
    place, session = store.places.get(claim.owner), store.sessions.current(claim.ttl)
    if place is None or session is None:
        return None
    left = session.since + certain_seconds(session.ttl) - backend.runtime.now()
    keys = store.names.of(claim.name)
    # Its own entry, and who comes next: nobody else is of interest.
    body = b"{%b}" % keys.from_on(place.order, 2)
    found = (await backend.gateway.post(RANGE, body, until)).get("kvs", ())
    if not found:
        return None
    own, *behind = found
    if (
        own["key"].encode() != store.key(claim)
        or int(own["create_revision"]) != place.order
        or own.get("lease") != session.id
        or requests.state_of(own, keys.prefix) != requests.HANDED
    ):
        return None
    store.handed.add(claim.owner)
    ref = Ref(own["key"], place.order, session.id, heir_of(behind))
    return Grant(claim, place.order, ref=ref, seconds=min(DIRECT_GRANT_SECONDS, left))


async def abandon(backend: EtcdBackend, claim: Claim, until: float | None = None) -> None:
    place = backend.store.places.pop(claim.owner, None)
    backend.store.handed.discard(claim.owner)
    order = None if place is None else place.order
    await _delete(backend, claim, backend.store.key(claim), order, until)
    backend.store.tags.retire(claim)


async def _delete(
    backend: EtcdBackend,
    claim: Claim,
    key: bytes,
    order: int | None,
    until: float | None = None,
) -> bool:
    """Calls who comes next, if the claim stands there since ``order`` and others knew it waits."""
    names, session = backend.store.names, backend.store.sessions.doubts.get(claim.owner)
    if session is not None:
        return await _undo(backend, claim, key, session, order, until)
    if order is None:
        answer = await backend.gateway.post(DELETE, b'{"key":"%b"}' % key, until)
        return bool(answer.get("deleted"))
    changes = [requests.delete(key), names.of(claim.name).next_after(order)]
    answer = await backend.gateway.post(TXN, requests.txn([], changes), until)
    await _call(backend, claim.name, answer["responses"][1], until)
    return bool(answer["responses"][0]["response_delete_range"].get("deleted"))


async def _undo(
    backend: EtcdBackend,
    claim: Claim,
    key: bytes,
    session: Session,
    order: int | None,
    until: float | None,
) -> bool:
    """The same for a claim with a request that may still arrive: what it may do is nothing."""
    doubts, names = backend.store.sessions.doubts, backend.store.names
    changes = [requests.delete(key), names.of(claim.name).next_after(order or 0)]
    guard = requests.put(names.guard(session.id), b"", session.id)
    try:
        answer = await backend.gateway.post(TXN, requests.txn([], [*changes, guard]), until)
    except SessionGone:
        # What still comes for it comes in vain. The claim itself may have asked again since, with
        # another lease.
        answer = await backend.gateway.post(TXN, requests.txn([], changes), until)
    except NoSpace:
        # What is there can be deleted. The guard is moved when there is space again: what still
        # comes is refused until then.
        await backend.gateway.post(TXN, requests.txn([], changes), until)
        raise
    else:
        await backend.learn_guard(session, until)
    doubts.pop(claim.owner, None)
    await _call(backend, claim.name, answer["responses"][1], until)
    return bool(answer["responses"][0]["response_delete_range"].get("deleted"))


async def skip(backend: EtcdBackend, name: str, absent: Entry, until: float | None) -> None:
    """Takes its place from somebody who was let in and did not come."""
    key = absent.key.encode()
    same = requests.changed_at(key, absent.changed)
    changes = [requests.delete(key), backend.store.names.of(name).next_after(absent.order)]
    answer = await backend.gateway.post(TXN, requests.txn([same], changes), until)
    if answer.get("succeeded"):
        await _call(backend, name, answer["responses"][1])


async def call_first(backend: EtcdBackend, name: str) -> None:
    """Calls whoever is first in line, if nobody holds."""
    first = backend.store.names.of(name).next_after(0)
    answer = await backend.gateway.post(TXN, requests.txn([], [first]))
    await _call(backend, name, answer["responses"][0])


async def _call(
    backend: EtcdBackend, name: str, reply: dict[str, Any], until: float | None = None
) -> None:
    names = backend.store.names
    for first in requests.line_of(reply["response_range"], names.of(name).prefix):
        if not first.given:
            wake = requests.wake(names.subscription(first.session), first.owner, first.session)
            try:
                await backend.gateway.post(TXN, requests.txn([], [wake]), until)
            except (SessionGone, BackendUnavailable):
                return  # if it is still there, it looks by itself in a moment
