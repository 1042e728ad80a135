"""What is peculiar to Consul: sessions, transactions, blocking queries, late requests, tokens."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

import pytest

import holdfast
from holdfast.claim import Busy, Mode
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, Incompatible, Unsupported
from holdfast.io.clock import now
from holdfast.stores.consul.agent import TXN
from holdfast.stores.consul.backend import MOST_PERMITS
from holdfast.stores.consul.session import NODE
from holdfast.testing import Flavour
from servers.consul import ConsulServer
from servers.process import wait_until
from servers.proxy import Proxy
from servers.registry import Servers
from stores.claims import claim_of
from stores.http_peer import Peer, peers
from stores.waiting import waited_for

SOON = 60.0


@pytest.fixture
def server(servers: Servers) -> ConsulServer:
    return servers.of(ConsulServer)


@pytest.fixture
def peer(server: ConsulServer, namespace: str) -> Iterator[Callable[[], Peer]]:
    with peers(server.url, namespace) as make:
        yield make


def test_a_hold_is_two_requests(peer: Callable[[], Peer]) -> None:
    """Once the client has its session, acquire and release are one request each."""
    one = peer()
    run_now(one.backend.release(one.take(claim_of())))
    for claim in (claim_of(), claim_of("read", Mode.SHARED)):
        one.post.asked.clear()
        run_now(one.backend.release(one.take(claim)))
        assert len(one.post.asked) == 2


def test_waiting_costs_one_request_more(peer: Callable[[], Peer]) -> None:
    """One request to join the queue, one to enter, one to release."""
    ours, theirs = peer(), peer()
    theirs.take(claim_of("warm"))
    grant = ours.take(claim_of())
    theirs.post.asked.clear()
    claim = claim_of()
    busy = theirs.attempt(claim)
    assert isinstance(busy, Busy)
    assert len(theirs.post.asked) == 1
    run_now(ours.backend.release(grant))
    run_now(theirs.backend.wait(claim, busy, now() + SOON))
    taken = theirs.take(claim)
    assert taken.token > grant.token
    run_now(theirs.backend.release(taken))
    assert len(theirs.post.asked) == 3


def test_holds_are_renewed_together(peer: Callable[[], Peer]) -> None:
    """One renewal of the session, and one transaction per 64 holds."""
    one = peer()
    grants = one.take_many(1000)
    one.post.asked.clear()
    renewal = run_now(one.backend.renew(grants, [], until=now() + SOON))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert len(one.post.asked) == 1 + ceil(1000 / 64)


def test_a_shorter_session_is_kept_alive_before_a_hold_moves_there(
    peer: Callable[[], Peer],
) -> None:
    """If the answer is lost, the holder counts on the whole of the shorter ttl."""
    one = peer()
    grant, other = one.take(claim_of(ttl=60.0)), one.take(claim_of("other", ttl=20.0))
    session = one.store.sessions.current(20.0)
    session.since -= 5.0  # as if it had not been renewed since
    sent = now()
    shorter = grant._replace(claim=grant.claim._replace(ttl=20.0))
    renewal = run_now(one.backend.renew([shorter], [], until=sent + SOON, shorten=True))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert session.since >= sent
    assert renewal.since is not None
    assert renewal.since >= sent
    for each in (grant, other):
        assert run_now(one.backend.release(each)) is True


@pytest.mark.parametrize("lands", [True, False], ids=["landed", "lost"])
@pytest.mark.parametrize("ttl", [20.0, 90.0])
def test_a_hold_that_was_moved_without_an_answer_is_found(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch, ttl: float, lands: bool
) -> None:
    """It is not lost, and its certain time is that of the session that it is bound to."""
    one = peer()
    grant = one.take(claim_of(ttl=60.0))
    other = grant._replace(claim=grant.claim._replace(ttl=ttl))
    ask = one.post.ask

    async def unanswered(line: bytes, body: bytes = b"", until: float | None = None) -> Any:
        if line != TXN:
            return await ask(line, body, until)
        if lands:
            await ask(line, body, until)
        raise BackendUnavailable("no answer came")

    with monkeypatch.context() as patch:
        patch.setattr(one.post, "ask", unanswered)
        renewal = run_now(one.backend.renew([other], [], until=now() + SOON, shorten=True))
    assert list(renewal.unknown) == [grant.claim.owner]
    for again in (grant, other):
        sent = now()
        renewal = run_now(one.backend.renew([again], [], until=sent + SOON))
        assert (renewal.lost, renewal.unknown) == ({}, {})
        assert renewal.since is not None
        assert renewal.since >= sent
    assert run_now(one.backend.release(grant)) is True
    assert not one.store.moving


def test_a_lost_mark_is_found_again(peer: Callable[[], Peer]) -> None:
    """A waiter whose grant got lost on the way back attempts again and gets the same grant."""
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


def test_a_waiter_without_its_entry_does_not_enter(
    peer: Callable[[], Peer], server: ConsulServer
) -> None:
    """A mark without an entry would be an invisible hold: another claim could enter beside it."""
    ours, theirs = peer(), peer()
    grant, claim = ours.take(claim_of()), claim_of()
    busy = theirs.attempt(claim)
    assert isinstance(busy, Busy)
    key = theirs.store.names.of("name").entry(claim).decode()
    assert server.ask(f"/v1/kv/{key}", method="DELETE") is True
    run_now(ours.backend.release(grant))
    run_now(theirs.backend.wait(claim, busy, now() + SOON))
    taken = theirs.take(claim)
    (found,) = server.ask(f"/v1/kv/{key}")
    assert found["Session"] == taken.ref.session
    assert isinstance(ours.attempt(claim_of()), Busy)


def test_a_destroyed_session_lets_the_next_waiter_enter(
    server: ConsulServer, namespace: str
) -> None:
    """The next waiter gets the name at once, with a higher token; the holder is notified."""
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
    """An entry of another protocol version is neither ignored nor overwritten."""
    one = peer()
    grant = one.take(claim_of())
    path = grant.ref.key.replace("%", "%25")
    assert server.ask(f"/v1/kv/{path}", [2], method="PUT") is True
    with pytest.raises(Incompatible, match="name"):
        one.attempt(claim_of())


def test_a_ttl_below_the_floor_is_refused(namespace: str, servers: Servers) -> None:
    """By the client if it knows the floor, by Consul if not."""
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
    """As many permits as one transaction can grant, and no more."""
    one = peer()
    most = claim_of("slots", Mode.SLOTS, weight=MOST_PERMITS, limit=100)
    grant = one.take(most)
    assert len(grant.slots) == MOST_PERMITS
    assert run_now(one.backend.release(grant)) is True
    with pytest.raises(Unsupported, match=str(MOST_PERMITS)):
        one.attempt(claim_of("slots", Mode.SLOTS, weight=MOST_PERMITS + 1, limit=100))


def test_waiting_for_many_names_is_bounded(server: ConsulServer, namespace: str) -> None:
    """Forty waits at once: sixteen have a blocking query, the others share reads; all enter."""
    with Proxy(server) as proxy:
        asyncio.run(_wait_for_many(server.url, proxy, namespace))


async def _wait_for_many(url: str, proxy: Proxy, namespace: str) -> None:
    async with (
        holdfast.connect_async(url, namespace=namespace) as ours,
        holdfast.connect_async(proxy.url, namespace=namespace, connections=2) as theirs,
    ):
        names = [f"name {number}" for number in range(40)]
        held = [await ours.lock(name).acquire() for name in names]
        tasks = [asyncio.create_task(theirs.lock(name).acquire()) for name in names]
        deadline = now() + SOON
        while sum(len(info.waiters) for info in await ours.list()) < len(names):
            assert now() < deadline
            await asyncio.sleep(0.05)
        assert proxy.open_connections <= 16 + 2 + 1
        for lease in held:
            assert lease
            await lease.release()
        for lease in await asyncio.gather(*tasks):
            assert lease
            assert await lease.release()


def test_many_names_are_waited_for_with_few_requests(server: ConsulServer, namespace: str) -> None:
    """Each wait reads once in five to eight seconds; waits without a query of their own share the
    reads between, 64 names per request."""
    for number in (10, 100):
        space = f"{namespace}{number}"
        with Proxy(server) as proxy:
            asked = asyncio.run(_requests_of_waits(server, proxy, space, number))
        assert asked <= 3 * number + 30


QUIET_SECONDS = 6.0


async def _requests_of_waits(server: ConsulServer, proxy: Proxy, space: str, number: int) -> int:
    """How many requests a client sends in six seconds that waits for so many names."""
    async with (
        holdfast.connect_async(server.url, namespace=space) as ours,
        holdfast.connect_async(proxy.url, namespace=space, connections=2) as theirs,
    ):
        names = [f"name {each}" for each in range(number)]
        held = [await ours.lock(name).acquire() for name in names]
        tasks = [asyncio.create_task(theirs.lock(name).acquire()) for name in names]
        deadline = now() + SOON
        while sum(len(info.waiters) for info in await ours.list()) < number:
            assert now() < deadline
            await asyncio.sleep(0.2)
        proxy.reset_counts()
        await asyncio.sleep(QUIET_SECONDS)
        asked = proxy.counts.requests
        for lease in held:
            assert lease
            await lease.release()
        for lease in await asyncio.gather(*tasks):
            assert lease
            assert await lease.release()
        return asked


def _is_closed_at_once(server: ConsulServer) -> bool:
    """Whether the server closes a new connection without an answer."""
    with socket.create_connection((server.host, server.port)) as probe:
        probe.settimeout(10.0)
        try:
            probe.sendall(b"GET /v1/status/leader HTTP/1.1\r\nHost: x\r\n\r\n")
            return probe.recv(1) == b""
        except ConnectionError:
            return True


def test_the_limit_of_connections_is_named(namespace: str) -> None:
    """Consul only closes the connection: the error says what the reason may be."""
    with ConsulServer(config={"limits": {"http_max_conns_per_client": 4}}) as small:
        others = [socket.create_connection((small.host, small.port)) for _ in range(16)]
        try:
            # Consul counts a connection some time after it accepted it, and in no order.
            wait_until("the end of a fifth connection", lambda: _is_closed_at_once(small), 30.0)
            with (
                holdfast.connect(small.url, namespace=namespace, patience=0.5) as locks,
                pytest.raises(BackendUnavailable, match="http_max_conns_per_client"),
                locks.lock("name"),
            ):
                pass
        finally:
            for other in others:
                other.close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[ConsulServer]:
    """A Consul that refuses requests without a token."""
    tokens = {"master": "8b9b1f3e-0000-4000-8000-000000000001"}
    acl = {"enabled": True, "default_policy": "deny", "tokens": tokens}
    with ConsulServer(config={"acl": acl}) as server:
        master = tokens["master"]
        # A new leader knows its tokens only a little after its election.
        wait_until("the ACLs", lambda: bool(server.ask(f"/v1/acl/tokens?token={master}")))
        yield server


RULES = """
    key_prefix "t" { policy = "write" }
    session_prefix "" { policy = "write" }
"""
"""The rules of docs/stores/consul.md, for the namespaces of these tests."""
NODE_RULE = 'node "holdfast-sessions" { policy = "write" }'


def _as_master(guarded: ConsulServer, path: str, body: object) -> Any:
    master = guarded.config["acl"]["tokens"]["master"]
    return guarded.ask(f"{path}?token={master}", body, method="PUT")


def _token(guarded: ConsulServer, name: str, rules: str) -> str:
    _as_master(guarded, "/v1/acl/policy", {"Name": name, "Rules": rules})
    options = {"Policies": [{"Name": name}]}
    return str(_as_master(guarded, "/v1/acl/token", options)["SecretID"])


@pytest.fixture(scope="module")
def token(guarded: ConsulServer) -> str:
    return _token(guarded, "locks", RULES + NODE_RULE)


@pytest.mark.usefixtures("no_recheck")
@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("way", ["url", "environment"])
def test_waiting_with_a_token(
    guarded: ConsulServer,
    token: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    flavour: Flavour,
) -> None:
    """The token is read from the URL or the environment, and blocking queries carry it too."""
    host = f"{guarded.host}:{guarded.port}"
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", token if way == "environment" else "another")
    url = f"consul://{host}" if way == "environment" else f"consul://:{token}@{host}"
    with waited_for(url, namespace, flavour):
        pass


def test_one_token_registers_the_node_of_all_sessions(
    guarded: ConsulServer, token: str, namespace: str
) -> None:
    """Later tokens need no right to register it. If the node is missing, the error says so."""
    _as_master(guarded, "/v1/catalog/deregister", {"Node": NODE})
    host = f"{guarded.host}:{guarded.port}"
    weaker = f"consul://:{_token(guarded, 'weaker', RULES)}@{host}"
    with (
        holdfast.connect(weaker, namespace=namespace) as locks,
        pytest.raises(BackendUnavailable, match="register: permission denied") as denied,
    ):
        locks.lock("name").acquire()
    assert denied.value.final
    for url in (f"consul://:{token}@{host}", weaker):
        with holdfast.connect(url, namespace=namespace) as locks, locks.lock("name"):
            pass


def test_tokens(
    guarded: ConsulServer, token: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token is never shown, and the error for a missing token says so."""
    host = f"{guarded.host}:{guarded.port}"
    with holdfast.connect(f"consul://:{token}@{host}", namespace=namespace) as locks:
        with locks.lock("name", timeout=SOON):
            pass
        assert token not in repr(locks)
        assert not any(finding.level == "broken" for finding in locks.check())
    monkeypatch.delenv("CONSUL_HTTP_TOKEN", raising=False)
    with (
        holdfast.connect(f"consul://{host}", namespace=namespace) as locks,
        pytest.raises(BackendUnavailable, match="the token is missing") as caught,
    ):
        locks.lock("name").acquire()
    assert caught.value.final
