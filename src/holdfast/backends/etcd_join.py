"""How a writer joins a line of ``etcd://`` that it expects: in one short request.

All that it has to know is who is last in the line and how long that is. Who else is there is read
only if it has to look again (``EtcdBackend.consider``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.backends import etcd_requests as requests
from holdfast.backends.etcd_leases import Place
from holdfast.claim import Busy, Grant
from holdfast.core.contract import QUEUE_CAP

if TYPE_CHECKING:
    from holdfast.backends.etcd_backend import EtcdBackend
    from holdfast.backends.etcd_requests import NameKeys
    from holdfast.backends.sessions import Attempt

__all__ = ["join_line"]


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
        store.places[claim.owner] = Place(revision, *written, 0, None)
        last = found["kvs"][0]
        calls = requests.state_of(last, keys.prefix) == requests.WAITING
        bell = session.id if calls and requests.is_writer(last["key"]) else ""
        front = last["key"], int(last["create_revision"])
        return Busy(ahead - 1, None, (front, revision, bell))
    verdict = store.judge(claim, requests.line_of(found, keys.prefix))
    store.places[claim.owner] = Place(revision, *written, 0, verdict.target)
    if verdict.fits:
        keys.lined_until = 0.0
        return None
    if ahead > 1:
        verdict = verdict._replace(place=ahead - 1, absent=())
    return await backend.stay(at, verdict, session.id, revision)
