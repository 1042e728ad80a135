"""Lease hand-over in Consul: a session that ends while a hold is being taken over."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from servers.consul import ConsulServer
from servers.registry import Servers
from stores.claims import claim_of
from stores.http_peer import Peer, peers

SOON = 60.0


@pytest.fixture
def peer(servers: Servers, namespace: str) -> Iterator[Callable[[], Peer]]:
    with peers(servers.of(ConsulServer).url, namespace) as make:
        yield make


def test_a_session_that_has_ended_is_not_used_again(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A taker whose new session was destroyed takes the hold over with another one."""
    ours, theirs = peer(), peer()
    grant = ours.take(claim_of())
    ref = run_now(ours.backend.hand_over(grant, until=now() + SOON))
    handed, claim = grant._replace(ref=tuple(ref)), claim_of()
    renewer = theirs.backend.renewer
    new = renewer.new

    async def ended(ttl: float, until: float) -> object:
        monkeypatch.undo()
        session = await new(ttl, until)
        await renewer.end(session.id, until)
        return session

    monkeypatch.setattr(renewer, "new", ended)
    with pytest.raises(BackendUnavailable, match="session"):
        run_now(theirs.backend.take_over(handed, claim, until=now() + SOON))
    taken = run_now(theirs.backend.take_over(handed, claim, until=now() + SOON))
    assert taken is not None
    assert run_now(theirs.backend.release(taken)) is True
