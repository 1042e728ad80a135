"""What is peculiar to Consul: sessions, transactions, blocking queries, late letters."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
from holdfast.backends.consul import ConsulStore
from holdfast.backends.consul_backend import MOST_PERMITS, ConsulBackend
from holdfast.claim import Busy, Claim, Grant, Mode, write_label
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, Incompatible, Unsupported
from holdfast.runtimes.blocking import BlockingRuntime
from holdfast.runtimes.clock import now
from holdfast.testing import Flavour
from holdfast.url import open_store
from holdfast.wires.http import Http, Reply
from servers.consul import ConsulServer
from servers.process import wait_until
from servers.proxy import Proxy
from servers.registry import Servers

SOON = 10.0


@pytest.fixture
def server(servers: Servers) -> ConsulServer:
    return servers.of(ConsulServer)


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


class Counting:
    """Counts requests, and can lose one: it is kept, and may be delivered later."""

    def __init__(self, http: Http) -> None:
        self.http, self.servers = http, http.servers
        self.asked: list[bytes] = []
        self.lose = b""
        self.lost: tuple[bytes, bytes] | None = None

    async def ask(self, line: bytes, body: bytes = b"", until: float | None = None) -> Reply:
        self.asked.append(line)
        if self.lose and self.lose in line:
            self.lose, self.lost = b"", (line, body)
            raise BackendUnavailable("lost on its way")
        return await self.http.ask(line, body, until)

    def forget(self) -> None:
        self.http.forget()

    async def close(self) -> None:
        await self.http.close()


class Peer:
    """A store and a blocking backend with counted requests."""

    def __init__(self, url: str, namespace: str) -> None:
        self.store: Any = open_store(url, Settings(namespace=namespace))
        assert isinstance(self.store, ConsulStore)
        self.backend: ConsulBackend = self.store.backend(BlockingRuntime())
        self.post = Counting(self.backend.agent.http)
        self.backend.agent.http = self.post

    def attempt(self, claim: Claim, join: bool = True) -> Grant | Busy:
        return run_now(self.backend.attempt(claim, join=join))

    def take(self, claim: Claim) -> Grant:
        answer = self.attempt(claim)
        assert isinstance(answer, Grant)
        return answer


@pytest.fixture
def peer(server: ConsulServer, namespace: str) -> Iterator[Callable[[], Peer]]:
    made: list[Peer] = []

    def make() -> Peer:
        made.append(Peer(server.url, namespace))
        return made[-1]

    yield make
    for one in made:
        run_now(one.backend.close())


def _claim(
    name: str = "name", mode: Mode = Mode.EXCLUSIVE, *, weight: int = 1, limit: int = 0
) -> Claim:
    label = write_label("host", 1, "thread", "")
    return Claim(name, mode, weight, limit, 30.0, secrets.token_hex(16), label)


def test_a_hold_is_two_requests(peer: Callable[[], Peer]) -> None:
    """Once the door has its session, taking and releasing are one request each."""
    one = peer()
    run_now(one.backend.release(one.take(_claim())))
    for claim in (_claim(), _claim("read", Mode.SHARED)):
        one.post.asked.clear()
        run_now(one.backend.release(one.take(claim)))
        assert len(one.post.asked) == 2


def test_waiting_costs_one_request_more(peer: Callable[[], Peer]) -> None:
    """One to join the line, one to be let in, one to release."""
    ours, theirs = peer(), peer()
    theirs.take(_claim("warm"))
    grant = ours.take(_claim())
    theirs.post.asked.clear()
    claim = _claim()
    assert isinstance(theirs.attempt(claim), Busy)
    assert len(theirs.post.asked) == 1
    run_now(ours.backend.release(grant))
    taken = theirs.take(claim)
    assert taken.token > grant.token
    run_now(theirs.backend.release(taken))
    assert len(theirs.post.asked) == 3


def test_handing_over_in_a_door_is_one_request(peer: Callable[[], Peer]) -> None:
    """The next waiter of the same door gets the name in the request that releases it."""
    one = peer()
    grant, claim = one.take(_claim()), _claim()
    assert isinstance(one.attempt(claim), Busy)
    one.post.asked.clear()
    was_ours, answer = run_now(one.backend.exchange(grant, claim))
    assert was_ours
    assert isinstance(answer, Grant)
    assert answer.token > grant.token
    assert len(one.post.asked) == 1


def test_holds_are_renewed_together(peer: Callable[[], Peer]) -> None:
    """One renewal, and one question for 64 holds at a time."""
    one = peer()
    grants = [one.take(_claim(f"name {number}")) for number in range(100)]
    one.post.asked.clear()
    renewal = run_now(one.backend.renew(grants, [], until=now() + SOON))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert len(one.post.asked) == 3


@pytest.mark.parametrize("granted", [False, True])
def test_a_late_request_arrives_in_vain(peer: Callable[[], Peer], granted: bool) -> None:
    """A request that was given up changes nothing when it arrives after all, whether its claim
    was undone or was granted by a second request and released."""
    one = peer()
    one.take(_claim("warm"))
    claim = _claim()
    one.post.lose = b"/txn"
    with pytest.raises(BackendUnavailable):
        one.attempt(claim)
    if granted:
        assert run_now(one.backend.release(one.take(claim))) is True
    else:
        run_now(one.backend.abandon(claim))
    assert one.post.lost is not None
    assert run_now(one.post.http.ask(*one.post.lost)).status == 409
    assert run_now(one.backend.look("name")).holders == ()
    one.take(_claim())  # the door itself goes on


def test_a_lost_mark_is_found_again(peer: Callable[[], Peer]) -> None:
    """A waiter whose grant was lost on the way back asks again and gets the same."""
    ours, theirs = peer(), peer()
    grant, claim = ours.take(_claim()), _claim()
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


def test_a_destroyed_session_loses_its_holds(
    peer: Callable[[], Peer], server: ConsulServer
) -> None:
    """All holds of a session are lost at once, with the reason; a new session adopts none."""
    one = peer()
    grants = [one.take(_claim(f"name {number}")) for number in range(3)]
    session = grants[0].ref.session
    assert server.ask(f"/v1/session/destroy/{session}", "", method="PUT") is True
    renewal = run_now(one.backend.renew(grants, [], until=now() + SOON))
    assert set(renewal.lost) == {grant.claim.owner for grant in grants}
    assert all("session" in reason for reason in renewal.lost.values())
    again = one.take(_claim("name 0"))
    assert again.ref.session != session
    assert again.token > grants[0].token


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
            assert lost.wait(3.0)
        assert held.release() is False


def test_a_foreign_version_is_refused(peer: Callable[[], Peer], server: ConsulServer) -> None:
    """What another protocol has stored is neither ignored nor overwritten."""
    one = peer()
    grant = one.take(_claim())
    path = grant.ref.key.replace("%", "%25")
    assert server.ask(f"/v1/kv/{path}", [2], method="PUT") is True
    with pytest.raises(Incompatible, match="name"):
        one.attempt(_claim())


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
    most = _claim("slots", Mode.SLOTS, weight=MOST_PERMITS, limit=100)
    grant = one.take(most)
    assert len(grant.slots) == MOST_PERMITS
    assert run_now(one.backend.release(grant)) is True
    with pytest.raises(Unsupported, match=str(MOST_PERMITS)):
        one.attempt(_claim("slots", Mode.SLOTS, weight=MOST_PERMITS + 1, limit=100))


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


@pytest.mark.parametrize("flavour", list(Flavour))
def test_tls(namespace: str, flavour: Flavour) -> None:
    """The certificate is verified; waiters are woken over TLS too."""
    with ConsulServer(tls=True) as server:
        with holdfast.connect(server.url, namespace=namespace) as locks:
            held = locks.lock("name").acquire()
            assert held
            got = threading.Event()
            thread = threading.Thread(target=_get, args=(server.url, namespace, flavour, got))
            thread.start()
            while not locks.inspect("name").waiters:
                pass
            assert held.release()
            assert got.wait(4)
            thread.join()
        bare = server.url.partition("?")[0]
        with (
            holdfast.connect(bare, namespace=namespace, patience=0.5) as locks,
            pytest.raises(BackendUnavailable, match="certificate"),
        ):
            locks.lock("name", timeout=0.5).acquire()


def _get(url: str, namespace: str, flavour: Flavour, got: threading.Event) -> None:
    if flavour is Flavour.BLOCKING:
        with holdfast.connect(url, namespace=namespace) as locks, locks.lock("name"):
            got.set()
    else:
        asyncio.run(_get_async(url, namespace, got))


async def _get_async(url: str, namespace: str, got: threading.Event) -> None:
    async with holdfast.connect_async(url, namespace=namespace) as locks, locks.lock("name"):
        got.set()


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
