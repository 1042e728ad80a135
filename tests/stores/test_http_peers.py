"""Tests that etcd and Consul share: number of requests, lost requests, ended sessions, TLS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import holdfast
from holdfast.claim import Busy, Grant, Mode
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.testing import Flavour
from servers.consul import ConsulServer
from servers.etcd import EtcdServer
from servers.registry import Servers
from stores.claims import claim_of
from stores.http_peer import Peer, peers
from stores.waiting import waited_for

SOON = 60.0


class Kind(NamedTuple):
    """The server of a store, and the values that differ."""

    server: Any
    refused_status: int
    """The status of a request that comes too late to change anything."""
    session: str
    end: Callable[[Any, Any], object]
    """Ends a session as an administrator does."""


KINDS = {
    "etcd": Kind(
        EtcdServer, 0, "lease", lambda server, old: server.ask("/v3/lease/revoke", {"ID": old})
    ),
    "consul": Kind(
        ConsulServer,
        409,
        "session",
        lambda server, old: server.ask(f"/v1/session/destroy/{old}", "", method="PUT"),
    ),
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def server(servers: Servers, kind: Kind) -> Any:
    return servers.of(kind.server)


@pytest.fixture
def peer(server: Any, namespace: str) -> Iterator[Callable[..., Peer]]:
    with peers(server.url, namespace) as make:
        yield make


def test_an_exchange_is_one_request(peer: Callable[[], Peer]) -> None:
    """The next waiter of the same client gets the name in the request that releases it."""
    one = peer()
    grant, claim = one.take(claim_of()), claim_of()
    assert isinstance(one.attempt(claim), Busy)
    one.post.asked.clear()
    was_ours, answer = run_now(one.backend.exchange(grant, claim))
    assert was_ours
    assert isinstance(answer, Grant)
    assert answer.token > grant.token
    assert len(one.post.asked) == 1


@pytest.mark.parametrize("flavour", list(Flavour))
def test_an_exchange_does_not_grant_a_released_claim_again(
    peer: Callable[[Flavour], Peer], flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim was granted a slot but is still in the local queue of its client, when another hold
    of that client is exchanged for it. It is released before the exchange is answered."""
    ours, theirs = peer(flavour), peer(flavour)
    held, other = (one.take(claim_of("name", Mode.SLOTS, limit=2)) for one in (ours, theirs))
    claim = claim_of("name", Mode.SLOTS, limit=2)
    assert isinstance(ours.attempt(claim), Busy)
    assert theirs.run(theirs.backend.release(other))
    came = ours.take(claim)
    release = ours.backend.release

    async def releases_both(grant: Grant) -> bool:
        was_ours: bool = await release(grant)
        assert await release(came)
        return was_ours

    monkeypatch.setattr(ours.backend, "release", releases_both)
    was_ours, answer = ours.run(ours.backend.exchange(held, claim))
    assert was_ours
    assert isinstance(answer, Busy)
    info = theirs.run(theirs.backend.look("name"))
    assert (info.holders, info.waiters) == ((), ())


@pytest.mark.parametrize("granted", [False, True])
def test_a_late_request_changes_nothing(
    peer: Callable[[], Peer], kind: Kind, granted: bool
) -> None:
    """A request that timed out at the client changes nothing when it arrives later, whether its
    claim was abandoned, or was granted by a second request and released."""
    one = peer()
    one.take(claim_of("warm"))
    claim = claim_of()
    one.post.lose = b"/txn"
    with pytest.raises(BackendUnavailable):
        one.attempt(claim)
    if granted:
        assert run_now(one.backend.release(one.take(claim))) is True
    else:
        run_now(one.backend.abandon(claim))
    assert one.post.lost is not None
    assert run_now(one.post.http.ask(*one.post.lost)).status == kind.refused_status
    assert run_now(one.backend.look("name")).holders == ()
    one.take(claim_of())  # the client still works


def test_a_session_that_was_ended_loses_its_holds(
    peer: Callable[[], Peer], server: Any, kind: Kind
) -> None:
    """All holds of a lease or session are lost at once, with the reason; a new session takes over
    none of them."""
    one = peer()
    grants = [one.take(claim_of(f"name {number}")) for number in range(3)]
    session = grants[0].ref.session
    assert kind.end(server, session)
    renewal = run_now(one.backend.renew(grants, [], until=now() + SOON))
    assert set(renewal.lost) == {grant.claim.owner for grant in grants}
    assert all(kind.session in reason for reason in renewal.lost.values())
    again = one.take(claim_of("name 0"))
    assert again.ref.session != session
    assert again.token > grants[0].token


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("waits", [False, True], ids=["held", "waiting"])
@pytest.mark.parametrize(("mode", "limit"), [(Mode.EXCLUSIVE, 0), (Mode.SLOTS, 1)])
def test_a_hold_counts_with_the_time_of_its_own_session(
    peer: Callable[..., Peer],
    server: Any,
    kind: Kind,
    mode: Mode,
    limit: int,
    waits: bool,
    flavour: Flavour,
) -> None:
    """An entry of an older session, whose claim has another ttl now, is moved to the session for
    that ttl when it is granted: it outlives the older session."""
    one, other = peer(flavour), peer(flavour)
    in_front = other.take(claim_of("name", mode, limit=limit)) if waits else None
    claim = claim_of("name", mode, limit=limit)
    first = one.attempt(claim)
    old = one.store.sessions.current(claim.ttl).id
    longer = claim._replace(ttl=2 * claim.ttl)
    if in_front is not None:
        assert isinstance(one.attempt(longer), Busy)
        assert other.run(other.backend.release(in_front))
    again = one.take(longer)
    assert isinstance(first, Busy) or again.token == first.token
    assert again.ref.session != old
    assert kind.end(server, old)
    renewal = one.run(one.backend.renew([again], [], until=now() + SOON))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert other.run(other.backend.look("name")).holders[0].token == again.token
    assert one.run(one.backend.release(again)) is True


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize(("mode", "limit"), [(Mode.EXCLUSIVE, 0), (Mode.SLOTS, 1)])
def test_a_hold_stays_in_a_session_of_a_longer_ttl(
    peer: Callable[..., Peer],
    monkeypatch: pytest.MonkeyPatch,
    mode: Mode,
    limit: int,
    flavour: Flavour,
) -> None:
    """An attempt with a shorter ttl, which may arrive after later requests, leaves a hold in its
    session. The grant has the time of that session, which is renewed first if it is old."""
    one = peer(flavour)
    longer = claim_of("name", mode, limit=limit, ttl=60.0)
    first = one.take(longer)
    clock = one.backend.runtime.now
    monkeypatch.setattr(one.backend.runtime, "now", lambda: clock() + 20.0)
    asked = one.backend.runtime.now()
    again = one.take(longer._replace(ttl=10.0))
    assert (again.token, again.slots) == (first.token, first.slots)
    assert again.ref.session == first.ref.session
    assert again.since is not None
    assert again.since >= asked
    assert one.run(one.backend.release(again)) is True


SLOW = 5.0
"""The duration of every request, by the clock of the test."""


def _slow(one: Peer, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Delay every answer by the clock of the peer. Returns by how much that clock is ahead."""
    ahead = [0.0]
    ask = one.post.ask

    async def late(line: bytes, body: bytes = b"", until: float | None = None) -> Any:
        reply = await ask(line, body)
        ahead[0] += SLOW
        return reply

    monkeypatch.setattr(one.post, "ask", late)
    monkeypatch.setattr(one.backend.runtime, "now", lambda: now() + ahead[0])
    return ahead


def test_the_time_of_a_session_counts_from_before_it_was_asked_for(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its creation, when it is kept alive for a new hold, and when it is renewed: the
    server counts from a moment before its answer."""
    one = peer()
    ahead = _slow(one, monkeypatch)
    claim = claim_of(ttl=60.0)
    asked = one.backend.runtime.now()
    made = one.take(claim)
    assert made.since is not None
    assert made.since < asked + 1.0
    ahead[0] += 40.0  # the session is old enough to be renewed first
    asked = one.backend.runtime.now()
    kept = one.take(claim_of("other", ttl=60.0))
    assert kept.since is not None
    assert asked <= kept.since < asked + 1.0
    asked = one.backend.runtime.now()
    renewal = run_now(one.backend.renew([made, kept], [], until=asked + SOON))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert asked <= renewal.since < asked + 1.0
    later = one.take(claim_of("third", ttl=60.0))
    assert later.since == renewal.since


@pytest.mark.usefixtures("no_recheck")
@pytest.mark.parametrize("flavour", list(Flavour))
def test_tls(servers: Servers, kind: Kind, namespace: str, flavour: Flavour) -> None:
    """The certificate is verified; waiters are woken over TLS too."""
    server = servers.of(kind.server, tls=True)
    with waited_for(server.url, namespace, flavour):
        pass
    bare = server.url.partition("?")[0]
    with (
        holdfast.connect(bare, namespace=namespace, patience=0.5) as locks,
        pytest.raises(BackendUnavailable, match="certificate"),
    ):
        locks.lock("name").acquire(blocking=False)
