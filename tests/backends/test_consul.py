"""What is peculiar to Consul: sessions, transactions, blocking queries, late letters."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

import holdfast
from backends.claims import claim_of
from backends.http_peer import Peer, peers
from holdfast.backends.consul_backend import MOST_PERMITS
from holdfast.claim import Busy, Mode
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, Incompatible, Unsupported
from holdfast.runtimes.clock import now
from servers.consul import ConsulServer
from servers.process import wait_until
from servers.proxy import Proxy
from servers.registry import Servers

SOON = 60.0


@pytest.fixture
def server(servers: Servers) -> ConsulServer:
    return servers.of(ConsulServer)


@pytest.fixture
def peer(server: ConsulServer, namespace: str) -> Iterator[Callable[[], Peer]]:
    with peers(server.url, namespace) as make:
        yield make


def test_a_hold_is_two_requests(peer: Callable[[], Peer]) -> None:
    """Once the door has its session, taking and releasing are one request each."""
    one = peer()
    run_now(one.backend.release(one.take(claim_of())))
    for claim in (claim_of(), claim_of("read", Mode.SHARED)):
        one.post.asked.clear()
        run_now(one.backend.release(one.take(claim)))
        assert len(one.post.asked) == 2


def test_waiting_costs_one_request_more(peer: Callable[[], Peer]) -> None:
    """One to join the line, one to be let in, one to release."""
    ours, theirs = peer(), peer()
    theirs.take(claim_of("warm"))
    grant = ours.take(claim_of())
    theirs.post.asked.clear()
    claim = claim_of()
    assert isinstance(theirs.attempt(claim), Busy)
    assert len(theirs.post.asked) == 1
    run_now(ours.backend.release(grant))
    taken = theirs.take(claim)
    assert taken.token > grant.token
    run_now(theirs.backend.release(taken))
    assert len(theirs.post.asked) == 3


def test_holds_are_renewed_together(peer: Callable[[], Peer]) -> None:
    """One renewal, and one question for 64 holds at a time."""
    one = peer()
    grants = [one.take(claim_of(f"name {number}")) for number in range(100)]
    one.post.asked.clear()
    renewal = run_now(one.backend.renew(grants, [], until=now() + SOON))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert len(one.post.asked) == 3


def test_a_lost_mark_is_found_again(peer: Callable[[], Peer]) -> None:
    """A waiter whose grant was lost on the way back asks again and gets the same."""
    ours, theirs = peer(), peer()
    grant, claim = ours.take(claim_of()), claim_of()
    assert isinstance(theirs.attempt(claim), Busy)
    run_now(ours.backend.release(grant))
    theirs.post.lose = b"/txn"
    with pytest.raises(BackendUnavailable):
        theirs.attempt(claim)
    assert theirs.post.lost is not None
    assert run_now(theirs.post.http.ask(*theirs.post.lost)).status == 200
    taken = theirs.take(claim)
    (holder,) = run_now(ours.backend.look("name")).holders
    assert holder.token == taken.token > grant.token
    assert run_now(theirs.backend.release(taken)) is True


def test_a_destroyed_session_lets_the_next_in(server: ConsulServer, namespace: str) -> None:
    """Who waits gets the name at once, with a higher token; who held it learns that."""
    url = f"{server.url}?session_ttl_min=1"
    with (
        holdfast.connect(url, namespace=namespace, ttl=3) as ours,
        holdfast.connect(url, namespace=namespace, ttl=3) as theirs,
    ):
        held = ours.lock("name").acquire()
        assert held
        lost = threading.Event()
        held.on_lost(lambda reason: lost.set())
        for session in server.ask("/v1/session/list"):
            if session["Name"].endswith(namespace):
                server.ask(f"/v1/session/destroy/{session['ID']}", "", method="PUT")
        with theirs.lock("name", timeout=SOON) as lease:
            assert lease.token > held.token
            assert lost.wait(SOON)
        assert held.release() is False


def test_a_foreign_version_is_refused(peer: Callable[[], Peer], server: ConsulServer) -> None:
    """What another protocol has stored is neither ignored nor overwritten."""
    one = peer()
    grant = one.take(claim_of())
    path = grant.ref.key.replace("%", "%25")
    assert server.ask(f"/v1/kv/{path}", [2], method="PUT") is True
    with pytest.raises(Incompatible, match="name"):
        one.attempt(claim_of())


def test_a_ttl_below_the_floor_is_refused(namespace: str, servers: Servers) -> None:
    """By the door where the floor is known, by Consul where it is not."""
    server = servers.of(ConsulServer, session_ttl_min="10s")
    with (
        holdfast.connect(server.url, namespace=namespace) as locks,
        pytest.raises(ValueError, match="10 s at least"),
    ):
        locks.lock("name", ttl=5)
    with (
        holdfast.connect(f"{server.url}?session_ttl_min=1", namespace=namespace) as locks,
        pytest.raises(Unsupported, match="must be between"),
    ):
        locks.lock("name", ttl=5).acquire()


def test_permits_have_a_limit(peer: Callable[[], Peer]) -> None:
    """As many as one transaction can grant, and not one more."""
    one = peer()
    most = claim_of("slots", Mode.SLOTS, weight=MOST_PERMITS, limit=100)
    grant = one.take(most)
    assert len(grant.slots) == MOST_PERMITS
    assert run_now(one.backend.release(grant)) is True
    with pytest.raises(Unsupported, match=str(MOST_PERMITS)):
        one.attempt(claim_of("slots", Mode.SLOTS, weight=MOST_PERMITS + 1, limit=100))


def test_waiting_for_many_names_is_bounded(server: ConsulServer, namespace: str) -> None:
    """Forty waits at once: sixteen are woken, the others look again, all get in."""
    with Proxy(server) as proxy:
        asyncio.run(_crowd(server.url, proxy, namespace))


async def _crowd(url: str, proxy: Proxy, namespace: str) -> None:
    async with (
        holdfast.connect_async(url, namespace=namespace) as ours,
        holdfast.connect_async(proxy.url, namespace=namespace, connections=2) as theirs,
    ):
        names = [f"name {number}" for number in range(40)]
        held = [await ours.lock(name).acquire() for name in names]
        tasks = [asyncio.create_task(theirs.lock(name).acquire()) for name in names]
        deadline = now() + SOON
        while sum(len(standing.waiters) for standing in await ours.list()) < len(names):
            assert now() < deadline
            await asyncio.sleep(0.05)
        assert proxy.open_connections <= 16 + 2 + 1
        for lease in held:
            assert lease
            await lease.release()
        for lease in await asyncio.gather(*tasks):
            assert lease
            assert await lease.release()


@pytest.fixture
def guarded() -> Iterator[ConsulServer]:
    """A Consul that lets nobody in without a token."""
    tokens = {"master": "8b9b1f3e-0000-4000-8000-000000000001"}
    acl = {"enabled": True, "default_policy": "deny", "tokens": tokens}
    with ConsulServer(config={"acl": acl}) as server:
        master = tokens["master"]
        # A new leader knows its tokens a little later than it leads.
        wait_until("the ACLs", lambda: bool(server.ask(f"/v1/acl/tokens?token={master}")))
        yield server


def test_tokens(guarded: ConsulServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the URL or the environment; a missing one is told."""
    master = guarded.config["acl"]["tokens"]["master"]
    rules = """
        key_prefix "t" { policy = "write" }
        session_prefix "" { policy = "write" }
    """
    policy = {"Name": "locks", "Rules": rules}
    guarded.ask(f"/v1/acl/policy?token={master}", policy, method="PUT")
    wish = {"Policies": [{"Name": "locks"}]}
    token = guarded.ask(f"/v1/acl/token?token={master}", wish, method="PUT")["SecretID"]
    host = f"{guarded.host}:{guarded.port}"
    with holdfast.connect(f"consul://:{token}@{host}", namespace=namespace) as locks:
        with locks.lock("name", timeout=SOON):
            pass
        assert token not in repr(locks)
        assert not any(finding.level == "broken" for finding in locks.check())
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", token)
    with (
        holdfast.connect(f"consul://{host}", namespace=namespace) as locks,
        locks.lock("name", timeout=SOON),
    ):
        pass
    monkeypatch.delenv("CONSUL_HTTP_TOKEN")
    with (
        holdfast.connect(f"consul://{host}", namespace=namespace) as locks,
        pytest.raises(Unsupported, match="the token is missing"),
    ):
        locks.lock("name").acquire()
