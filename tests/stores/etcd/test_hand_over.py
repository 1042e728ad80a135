"""Lease hand-over in etcd: requests of the old owner that arrive late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.claim import Claim, Mode
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores.etcd.messages import integer
from holdfast.testing import Flavour
from stores.claims import claim_of
from stores.etcd import helpers
from stores.http_peer import Peer

SOON = 60.0
server, peer = helpers.server, helpers.peer
Peers = Callable[[Flavour], Peer]


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("mode", list(Mode))
def test_a_late_move_does_not_bind_what_was_handed_over(
    peer: Peers, flavour: Flavour, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ``extend`` to another ttl was not answered, and etcd executes it after the hand-over. The
    hold stays with a lease of its own, which nobody renews, and can be taken over."""
    ours, theirs = peer(flavour), peer(flavour)
    grant = ours.take(_claim(mode))
    extended = grant._replace(claim=grant.claim._replace(ttl=60.0))
    late: list[tuple[bytes, bytes]] = []
    ask = ours.post.ask

    async def hold_back(line: bytes, body: bytes = b"", until: float | None = None) -> Any:
        session = ours.store.sessions.current(60.0)
        if session and integer(3, int(session.id)) in body and b"Txn" in line:
            late.append((line, body))
            raise BackendUnavailable("it is on its way")
        return await ask(line, body, until)

    monkeypatch.setattr(ours.post, "ask", hold_back)
    renewal = ours.run(ours.backend.renew([extended], [], until=now() + SOON))
    assert list(renewal.unknown) == [grant.claim.owner]
    monkeypatch.undo()
    ref = ours.run(ours.backend.hand_over(grant, until=now() + SOON))
    assert ref is not None
    ((line, body),) = late
    ours.run(ours.post.http.ask(line, body))
    session = ours.store.sessions.current(60.0)
    assert ours.run(ours.backend.leases.time_to_live(session.id))[1] == set()
    handed = grant._replace(ref=tuple(ref))
    taken = theirs.run(theirs.backend.take_over(handed, _claim(mode), until=now() + SOON))
    assert taken is not None
    assert theirs.run(theirs.backend.release(taken)) is True


@pytest.mark.parametrize("mode", list(Mode))
def test_a_client_forgets_what_it_has_handed_on(peer: Peers, mode: Mode) -> None:
    """One that takes leases over and hands them on does not grow."""
    one = peer(Flavour.BLOCKING)
    grant = one.take(_claim(mode))
    for _ in range(3):
        ref = one.run(one.backend.hand_over(grant, until=now() + SOON))
        handed = grant._replace(ref=tuple(ref))
        grant = one.run(one.backend.take_over(handed, _claim(mode), until=now() + SOON))
    assert list(one.store.taking) == [grant.claim.owner]
    assert one.run(one.backend.release(grant)) is True
    assert not one.store.taking


def _claim(mode: Mode) -> Claim:
    claim = claim_of(ttl=30.0)
    return claim._replace(mode=mode, limit=2 if mode is Mode.SLOTS else 0)
