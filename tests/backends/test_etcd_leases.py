"""Leases of etcd that end while a claim has doubts, or are changed under a hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backends import etcd_bench
from backends.claims import claim_of
from backends.http_peer import Peer
from holdfast.claim import Busy, Grant
from holdfast.errors import BackendUnavailable
from holdfast.testing import Flavour
from servers.etcd import EtcdServer

SOON = 60.0
server, peer = etcd_bench.server, etcd_bench.peer
Peers = Callable[[Flavour], Peer]
every_flavour = pytest.mark.parametrize("flavour", list(Flavour))


@every_flavour
@pytest.mark.parametrize("waits", [False, True], ids=["held", "waiting"])
def test_an_outage_that_ends_a_lease_leaves_nothing_behind(
    peer: Peers, server: EtcdServer, flavour: Flavour, waits: bool
) -> None:
    """A request went unanswered and its lease ran out before the claim asked again: what that
    one got, under another lease, is given back like any other."""
    ours, theirs = peer(flavour), peer(flavour)
    ours.run(ours.backend.release(ours.take(claim_of("warm"))))
    held = theirs.take(claim_of()) if waits else None
    claim = claim_of()
    ours.post.lose = b"txn"
    with pytest.raises(BackendUnavailable):
        ours.attempt(claim)
    (session,) = ours.store.sessions.all()
    server.ask("/v3/lease/revoke", {"ID": session.id})
    answer = ours.attempt(claim)
    assert session not in ours.store.sessions.all()
    if isinstance(answer, Grant):
        assert ours.run(ours.backend.release(answer)) is True
    else:
        ours.run(ours.backend.abandon(claim))
    assert isinstance(answer, Busy) is waits
    standing = theirs.run(theirs.backend.look("name"))
    assert ([each.token for each in standing.holders], standing.waiters) == (
        [] if held is None else [held.token],
        (),
    )
    assert not ours.store.sessions.doubts
