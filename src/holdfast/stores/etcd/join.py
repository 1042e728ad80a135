"""How a writer takes a name of ``etcd://``, or joins the line that it expects there.

Both are one short request, since etcd's gateway takes its time with long ones. All that a writer
has to know is who is last in the line and how long that is. Who else is there is read
only if it has to look again (``EtcdBackend.consider``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.claim import Busy, Grant
from holdfast.core.contract import QUEUE_CAP
from holdfast.stores.etcd import requests
from holdfast.stores.etcd.session import Place

if TYPE_CHECKING:
    from holdfast.stores._consensus.sessions import Attempt
    from holdfast.stores.etcd.backend import EtcdBackend
    from holdfast.stores.etcd.requests import NameKeys

__all__ = ["join_line", "take"]


async def take(backend: EtcdBackend, at: Attempt, keys: NameKeys) -> Grant | None:
    """A writer's first attempt at a name that should be free; ``None`` if it is not."""
    claim, _, session, _ = at
    key = backend.store.key(claim)
    held = requests.entry_value(claim, backend.runtime.wall(), held=True)
    body = keys.taking(backend.guard(session), key, session.id, held)
    answer = await backend.send(at, body)
    if answer.get("succeeded"):
        return backend.granted(claim, session, key, int(answer["header"]["revision"]), ())
    keys.crowded = True
    return None


async def join_line(backend: EtcdBackend, at: Attempt, keys: NameKeys) -> Grant | Busy | None:
    """A writer's first attempt at a name that others want too; ``None`` to look again."""
    claim, _, session, _ = at
    key, since, guard = backend.store.key(claim), backend.runtime.wall(), backend.guard(session)
    waiting = requests.entry_value(claim, since, held=False)
    if backend.runtime.now() < keys.lined_until:
        answer = await backend.send(at, keys.joining(guard, key, session.id, waiting))
        joined = answer.get("succeeded")
    else:
        held = requests.entry_value(claim, since, held=True)
        body = keys.entering(guard, key, session.id, held, waiting)
        answer = await backend.send(at, body)
        if answer.get("succeeded"):
            keys.crowded = False
            return backend.granted(claim, session, key, int(answer["header"]["revision"]), ())
        joined = answer["responses"][1]["response_txn"].get("succeeded")
    if not joined:  # it stands there already, or must not
        return await backend.consider(at, keys, None)
    return await _stand(backend, at, answer, (waiting, since))


async def _stand(
    backend: EtcdBackend, at: Attempt, answer: dict[str, Any], written: tuple[bytes, float]
) -> Busy | None:
    """Behind whom it stands now; ``None`` if nobody was there after all."""
    claim, session, store = at.claim, at.session, backend.store
    keys, revision = store.names.of(claim.name), int(answer["header"]["revision"])
    found = answer["responses"][0]["response_range"]
    ahead = int(found.get("count", 0))
    if 1 < ahead <= QUEUE_CAP:  # as usual: whoever holds, it is not the one that is waited for
        last = found["kvs"][0]
        calls = requests.state_of(last, keys.prefix) == requests.WAITING
        store.places[claim.owner] = Place(revision, *written, 0, None)
        subscription = session.id if calls and requests.is_writer(last["key"]) else ""
        front = last["key"], int(last["create_revision"])
        return Busy(ahead - 1, None, (front, revision, subscription))
    verdict = store.judge(claim, requests.line_of(found, keys.prefix))
    store.places[claim.owner] = Place(revision, *written, 0, verdict.target)
    if verdict.fits:
        keys.lined_until = 0.0
        return None
    if ahead > 1:
        verdict = verdict._replace(place=ahead - 1, absent=())
    return await backend.stay(at, verdict, session.id, revision)
