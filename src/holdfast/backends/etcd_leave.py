"""How claims of ``etcd://`` leave a name, and how whoever is next gets it.

A waiter behind another waiter does not watch it from the start: who is granted after a wait reads
along who comes next, and its release hands the name over to that one and writes its bell, a key
that its door watches all the time. The heir makes sure with a linearizable read. It says in its
entry that it came only if it holds for longer than a moment (``Leases.renew``); if it did not come,
others take its place from it as from any waiter that is let in and does not come.

Whatever leaves the line without calling (a lease that ran out) is noticed by the watch that every
wait begins a moment later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.backends import etcd_requests as requests
from holdfast.backends.etcd_gateway import SessionGone
from holdfast.backends.etcd_leases import SOMEBODY, TXN, Heir, Ref
from holdfast.backends.lines import Entry
from holdfast.claim import Claim, Grant
from holdfast.core.contract import GRACE_SECONDS
from holdfast.errors import BackendUnavailable

if TYPE_CHECKING:
    from holdfast.backends.etcd_backend import EtcdBackend

__all__ = ["abandon", "call_first", "handed_to", "heir_of", "release", "skip"]

DELETE = b"POST /v3/kv/deleterange"


def heir_of(reply: dict[str, Any]) -> Heir | None:
    """Who comes next, by the answer to ``next_after``."""
    for kv in reply["response_range"].get("kvs", ()):
        if requests.is_writer(kv["key"]):
            changed, session = int(kv["mod_revision"]), kv.get("lease", "0")
            return Heir(kv["key"], kv["value"], changed, session)
    return None


async def release(backend: EtcdBackend, grant: Grant) -> bool:
    ref = Ref(*grant.ref)
    key, heir = ref.key.encode(), ref.heir
    backend.store.places.pop(grant.claim.owner, None)
    backend.store.handed.discard(grant.claim.owner)
    if heir is None or heir == SOMEBODY or grant.claim.owner in backend.store.sessions.doubts:
        return await _delete(backend, grant.claim, key, None if heir is None else grant.token)
    answer = await backend.gateway.post(TXN, _handing(backend, grant, heir))
    if not answer.get("succeeded"):
        await _call(backend, grant.claim.name, answer["responses"][1])
    return bool(answer["responses"][0]["response_delete_range"].get("deleted"))


def _handing(backend: EtcdBackend, grant: Grant, heir: Heir) -> bytes:
    """Hands the name over if it is ours and the heir still waits, and else just leaves."""
    names = backend.store.names
    key, next_key = Ref(*grant.ref).key.encode(), heir.key.encode()
    ours = [requests.created_at(key, grant.token), requests.changed_at(next_key, heir.changed)]
    handed = requests.change(next_key, requests.handed_value(heir.value))
    ring = requests.ring(names.bell(heir.session), requests.owner_of(heir.key), heir.session)
    leaving, look = requests.delete(key), names.of(grant.claim.name).next_after(grant.token)
    return requests.txn(ours, [leaving, handed, ring], [leaving, look])


async def handed_to(backend: EtcdBackend, claim: Claim, until: float) -> Grant | None:
    """What was handed over to a claim that was called, by a linearizable read; it is for as long
    as nobody can have lost patience, and for the time that its lease has left."""
    store, key = backend.store, backend.store.names.of(claim.name).entry(claim)
    place, session = store.places.get(claim.owner), store.sessions.current(claim.ttl)
    if place is None or session is None:
        return None
    left = session.since + session.ttl - backend.runtime.now()
    reads = [requests.read(key), store.names.of(claim.name).next_after(place.order)]
    answer = await backend.gateway.post(TXN, requests.txn([], reads), until)
    prefix = store.names.of(claim.name).prefix
    for own in requests.line_of(answer["responses"][0]["response_range"], prefix):
        if own.given and not own.held and own.session == session.id:
            store.handed.add(claim.owner)
            ref = Ref(key.decode(), session.id, session.ttl, heir_of(answer["responses"][1]))
            return Grant(claim, own.order, ref=ref, seconds=min(GRACE_SECONDS, left))
    return None


async def abandon(backend: EtcdBackend, claim: Claim) -> None:
    place = backend.store.places.pop(claim.owner, None)
    backend.store.handed.discard(claim.owner)
    key = backend.store.names.of(claim.name).entry(claim)
    await _delete(backend, claim, key, None if place is None else place.order)


async def _delete(backend: EtcdBackend, claim: Claim, key: bytes, order: int | None) -> bool:
    """Calls who comes next, if the claim stands there since ``order`` and others knew it waits."""
    doubts, names = backend.store.sessions.doubts, backend.store.names
    session = doubts.get(claim.owner)
    if session is None and order is None:
        answer = await backend.gateway.post(DELETE, b'{"key":"%b"}' % key)
        return bool(answer.get("deleted"))
    changes = [requests.delete(key), names.of(claim.name).next_after(order or 0)]
    if session is not None:
        changes.append(requests.put(names.guard(session.id), b"", session.id))
    try:
        answer = await backend.gateway.post(TXN, requests.txn([], changes))
    except SessionGone:  # and with it the claim's entry, and whatever still comes
        doubts.pop(claim.owner, None)
        return False
    if session is not None:
        await backend.learn_guard(session)
        doubts.pop(claim.owner, None)
    await _call(backend, claim.name, answer["responses"][1])
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


async def _call(backend: EtcdBackend, name: str, reply: dict[str, Any]) -> None:
    names = backend.store.names
    for first in requests.line_of(reply["response_range"], names.of(name).prefix):
        if not first.given:
            ring = requests.ring(names.bell(first.session), first.owner, first.session)
            try:
                await backend.gateway.post(TXN, requests.txn([], [ring]))
            except (SessionGone, BackendUnavailable):
                return  # if it is still there, it looks by itself in a moment
