"""What only ZooKeeper has: its round trips, sessions and nodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from kazoo.client import KazooClient

import holdfast
from holdfast.claim import Busy, Grant
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, Incompatible, Unsupported
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.zookeeper import backend as zookeeper
from holdfast.stores.zookeeper.backend import ZooKeeperBackend
from holdfast.stores.zookeeper.client.packets import NoNode, Request
from holdfast.stores.zookeeper.session import BEATS_PER_TTL, ZooKeeperSession
from holdfast.stores.zookeeper.store import MOST_IDLE_SESSIONS, ZooKeeperStore
from holdfast.stores.zookeeper.wakeups import ListingPrefetch
from holdfast.url import open_store
from servers.process import wait_until
from servers.registry import Servers
from servers.zookeeper import ZooKeeperServer
from stores.claims import claim_of
from stores.zookeeper import helpers
from stores.zookeeper.helpers import QuickServer, ShortSessionsServer, nodes_of, session_of

SOON = 60.0
server, locks = helpers.server, helpers.locks


def test_a_hold_is_two_round_trips(
    server: QuickServer, namespace: str, round_trips: list[list[str]]
) -> None:
    """Create and listing are sent back to back; the release is one request."""
    with holdfast.connect(server.url, namespace=namespace) as locks:
        lock = locks.lock("name")
        with lock:
            pass
        again = True
        while again:
            round_trips.clear()
            with lock:
                pass
            again = [
                "Container"
            ] in round_trips  # the servers had deleted the name, which was empty
    assert round_trips == [["Create", "Listing"], ["Delete"]]


def test_a_woken_waiter_makes_no_round_trip(
    server: QuickServer, namespace: str, round_trips: list[list[str]]
) -> None:
    """The listing was requested when the watch fired, and is there when the waiter wakes."""
    store = open_store(server.url, Settings(namespace=namespace))
    ours, theirs = store.backend(BlockingRuntime()), store.backend(BlockingRuntime())
    grant = run_now(ours.attempt(claim_of(), join=True))
    assert isinstance(grant, Grant)
    claim = claim_of()
    busy = run_now(theirs.attempt(claim, join=True))
    assert isinstance(busy, Busy)
    assert run_now(ours.release(grant))
    round_trips.clear()
    assert isinstance(run_now(theirs.wait(claim, busy, now() + 30)), Grant)
    assert round_trips == []
    run_now(ours.close())
    run_now(theirs.close())


def test_a_stale_listing_grants_nothing(
    server: QuickServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sync before the listing has failed."""
    store = open_store(server.url, Settings(namespace=namespace))
    backend, claim, send = store.backend(BlockingRuntime()), claim_of(), ListingPrefetch.send

    def fail(prefetch: ListingPrefetch) -> None:
        prefetch._sync.error = NoNode()
        send(prefetch)

    grant = run_now(backend.attempt(claim_of(), join=True))
    assert isinstance(grant, Grant)
    busy = run_now(backend.attempt(claim, join=True))
    assert isinstance(busy, Busy)
    assert run_now(backend.release(grant))
    monkeypatch.setattr(ListingPrefetch, "send", fail)
    assert run_now(backend.wait(claim, busy, now() + SOON)) is None
    assert isinstance(run_now(backend.attempt(claim, join=True)), Grant)
    run_now(backend.close())


def test_a_next_waiter_that_has_released_is_not_queued_again(
    server: QuickServer, namespace: str, kazoo: KazooClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own thread may get and release the lock before the exchange reads its replies."""
    store = open_store(server.url, Settings(namespace=namespace))
    backend = store.backend(BlockingRuntime())
    grant = run_now(backend.attempt(claim_of(), join=True))
    next_waiter = claim_of()
    assert isinstance(grant, Grant)
    assert isinstance(run_now(backend.attempt(next_waiter, join=True)), Busy)
    request = ZooKeeperSession.request

    def request_slowly(
        session: ZooKeeperSession, seconds: float, requests: Sequence[Request]
    ) -> None:
        monkeypatch.setattr(ZooKeeperSession, "request", request)
        request(session, seconds, requests)
        own = run_now(backend.attempt(next_waiter, join=True))
        assert isinstance(own, Grant)
        assert run_now(backend.release(own)) is True

    monkeypatch.setattr(ZooKeeperSession, "request", request_slowly)
    ours, answer = run_now(backend.exchange(grant, next_waiter))  # type: ignore[attr-defined]
    assert ours is True
    assert isinstance(answer, Busy)
    assert nodes_of(kazoo, f"/{namespace}/locks/name") == []
    run_now(backend.close())


def test_a_next_waiter_that_does_not_wait_is_soon_skipped(
    server: QuickServer, namespace: str
) -> None:
    """It gave up before the exchange queued it: its owner is absent."""
    store: Any = open_store(server.url, Settings(namespace=namespace))
    backend = store.backend(BlockingRuntime())
    grant = run_now(backend.attempt(claim_of(), join=True))
    assert isinstance(run_now(backend.attempt(claim_of(), join=True)), Busy)
    gone = claim_of()
    ours, answer = run_now(backend.exchange(grant, gone))
    assert ours is True
    assert isinstance(answer, Busy)
    assert store.entries[gone.owner].is_absent(now() + SOON)
    run_now(backend.close())


def test_a_closed_client_opens_no_session(server: QuickServer, namespace: str) -> None:
    """A late request would leave a session open for ever."""
    store: Any = open_store(server.url, Settings(namespace=namespace))
    backend = store.backend(BlockingRuntime())
    assert isinstance(run_now(backend.attempt(claim_of(), join=True)), Grant)
    run_now(backend.close())
    with pytest.raises(BackendUnavailable, match="closed"):
        run_now(backend.attempt(claim_of(), join=True))


@pytest.mark.faults
def test_a_thousand_tasks_share_one_connection(server: QuickServer, namespace: str) -> None:
    """Waiting tasks of one client need no connections of their own."""

    async def wait_all() -> None:
        async with holdfast.connect_async(server.url, namespace=namespace) as locks:
            lock = locks.lock("name")
            before = server.connections()

            async def take() -> int:
                async with lock as lease:
                    return lease.token

            async with lock:
                tasks = [asyncio.create_task(take()) for _ in range(1000)]
                await asyncio.sleep(0.2)
                assert server.connections() - before <= 1
            tokens = await asyncio.gather(*tasks)
            assert tokens == sorted(set(tokens))

    asyncio.run(wait_all())


def test_a_session_that_ends_loses_its_holds(
    server: QuickServer, namespace: str, kazoo: KazooClient
) -> None:
    """All of them, with the reason; the next session adopts no node."""
    with holdfast.connect(server.url, namespace=namespace, ttl=6) as locks:
        leases = [locks.lock(name).acquire() for name in ("a", "b")]
        lost = [threading.Event() for _ in leases]
        for lease, event in zip(leases, lost, strict=True):
            assert lease is not None
            lease.on_lost(lambda _, event=event: event.set())  # type: ignore[misc]
        (session,) = [s for s in _sessions(locks).values() if s.id]
        known = session._known
        other_client = KazooClient(
            f"{server.host}:{server.port}", client_id=(known.number, known.password)
        )
        other_client.start()
        other_client.stop()
        other_client.close()
        for lease, event in zip(leases, lost, strict=True):
            assert lease is not None
            assert event.wait(SOON)
            assert "session" in lease.reason
        with locks.lock("a", timeout=SOON) as lease:
            assert leases[0] is not None
            assert lease.token > leases[0].token
        assert nodes_of(kazoo, f"/{namespace}/locks/b") == []


def _sessions(locks: holdfast.Locks) -> dict[int, ZooKeeperSession]:
    sessions: dict[int, ZooKeeperSession] = locks._engine.store.sessions  # type: ignore[attr-defined]
    return sessions


def test_a_ttl_is_refused_with_its_limits(servers: Servers, namespace: str) -> None:
    """At least two ticks; at most what the longest session allows."""
    slow = servers.of(ZooKeeperServer, tick_ms=2000)
    with holdfast.connect(slow.url, namespace=namespace) as locks:
        with pytest.raises((Unsupported, ValueError), match="4 s"):
            locks.lock("name", ttl=3).acquire()
        with pytest.raises((Unsupported, ValueError), match="60 s: use ttl=52 or less, or raise"):
            locks.lock("name", ttl=60).acquire()
        with pytest.raises(ValueError, match="1728000 s at most"):  # ZooKeeper counts 32 bits of ms
            locks.lock("name", ttl=30 * 24 * 3600)
        with locks.lock("name", ttl=4) as lease:
            assert lease.held


def test_sessions_without_holds_are_closed(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty ttls one after the other: some sessions stay for the next claims, and go later. A
    session with a hold stays."""
    held = locks.lock("held", ttl=helpers.TTL).acquire()
    assert held
    for ttl in range(5, 25):
        with locks.lock("name", ttl=ttl):
            pass
    kept = set(_sessions(locks))
    assert helpers.TTL in kept
    assert len(kept) <= MOST_IDLE_SESSIONS + 2
    monkeypatch.setattr("holdfast.stores.zookeeper.store.IDLE_SESSION_SECONDS", 0.1)
    wait_until("closed sessions", lambda: set(_sessions(locks)) == {helpers.TTL})
    assert held.release() is True
    assert helpers.hold(locks, "name") > 0


def test_few_idle_sessions_are_kept(locks: holdfast.Locks) -> None:
    """Another one is opened beside them: none is closed while there are not too many."""
    for ttl in range(5, 5 + MOST_IDLE_SESSIONS):
        with locks.lock("name", ttl=ttl):
            pass
    assert set(_sessions(locks)) == set(range(5, 5 + MOST_IDLE_SESSIONS))


@pytest.mark.parametrize("late", [False, True])
def test_a_session_that_a_claim_has_just_found_is_not_closed(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """A claim comes between the check that a session is idle and its end: else its hold would end
    with the session, and its holder would not know."""
    with locks.lock("name", ttl=helpers.TTL):
        pass
    store: ZooKeeperStore = locks._engine.store  # type: ignore[assignment]
    session, is_idle = store.sessions[helpers.TTL], store._is_idle
    taken: list[holdfast.Lease | None] = []

    def check(key: int, checked: ZooKeeperSession) -> bool:
        idle = is_idle(key, checked)
        if not taken and late is (key not in store.sessions):
            taken.append(locks.lock("name", ttl=helpers.TTL).acquire())
        return idle

    monkeypatch.setattr(store, "_is_idle", check)
    if not late:
        assert store._is_idle(helpers.TTL, session)
    store._close_if_idle(helpers.TTL, session)
    assert len(taken) == 1
    assert not session.dead
    assert store.sessions[helpers.TTL] is session
    assert taken[0] is not None
    assert taken[0].release() is True


def test_a_session_with_a_release_under_way_is_not_closed(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = locks.lock("name", ttl=helpers.TTL).acquire()
    store: ZooKeeperStore = locks._engine.store  # type: ignore[assignment]
    session, connected = store.sessions[helpers.TTL], ZooKeeperBackend.connected_session

    async def close_first(
        backend: ZooKeeperBackend, key: int, until: float | None = None
    ) -> ZooKeeperSession:
        store._close_if_idle(key, session)
        return await connected(backend, key, until)

    monkeypatch.setattr(ZooKeeperBackend, "connected_session", close_first)
    assert lease
    assert lease.release() is True
    assert not session.dead


def test_a_client_keeps_its_session_on_another_event_loop(
    server: QuickServer, namespace: str
) -> None:
    """The session belongs to no loop. ``close`` works on a later one."""
    with holdfast.connect(server.url, namespace=namespace, ttl=helpers.TTL) as first:
        assert helpers.hold(first, "name")  # starts the threads of the process
    before = threading.active_count()
    locks = holdfast.connect_async(server.url, namespace=namespace, ttl=helpers.TTL)

    async def use() -> int:
        async with locks.lock("name"):
            session: int = locks._engine.store.sessions[helpers.TTL].id  # type: ignore[attr-defined]
            return session

    assert len({asyncio.run(use()) for _ in range(3)}) == 1
    asyncio.run(locks.close())
    wait_until("ended threads", lambda: threading.active_count() <= before)


def test_check_says_that_the_default_ttl_does_not_fit(servers: Servers, namespace: str) -> None:
    """Before the first lock is acquired, and with what to do."""
    short = servers.of(ZooKeeperServer, longest_ms=20_000)
    with holdfast.connect(short.url, namespace=namespace) as locks:
        details = [f.detail for f in locks.check() if f.subject == "ttl" and f.level == "warning"]
        with pytest.raises(Unsupported, match=r"use ttl=1[0-9] or less"):
            locks.lock("name").acquire()
    (detail,) = details
    assert "use ttl=1" in detail
    assert "maxSessionTimeout" in detail


def test_the_tick_is_not_derived_from_a_short_session(servers: Servers, namespace: str) -> None:
    """Followers report to the leader every half tick, however short a session may be. The session
    timeout must include that, or more time would count as certain than the leader grants."""
    server = servers.of(ShortSessionsServer)
    half_a_tick, ttl = server.tick_ms / 2000, 2
    beats = ttl / BEATS_PER_TTL
    for tick, lag in (("", 2.0), ("?tick=0.1", 0.25), ("?tick=4", 4.0)):
        with holdfast.connect(f"{server.url}{tick}", namespace=namespace, ttl=ttl) as locks:
            session = session_of(locks, ttl)
            assert session.floor == 0.5
            assert session.lag == lag
            assert session.timeout - ttl >= beats + lag
            (found,) = [each for each in locks.check() if each.subject == "tick"]
            assert f"{lag:g} s" in found.detail
    assert half_a_tick < 2.0


def test_the_error_for_short_ticks_names_the_option(servers: Servers, namespace: str) -> None:
    """The longest session may be too short with the usual tick."""
    server = servers.of(ZooKeeperServer, tick_ms=100, longest_ms=2000)
    with (
        holdfast.connect(server.url, namespace=namespace, ttl=1) as locks,
        pytest.raises(Unsupported, match=r"2 s: too short for any ttl: .* \?tick="),
    ):
        locks.lock("name").acquire()
    with (
        holdfast.connect(f"{server.url}?tick=0.1", namespace=namespace, ttl=1) as locks,
        locks.lock("name") as lease,
    ):
        assert lease.held


def test_unused_names_are_deleted(server: QuickServer, namespace: str, kazoo: KazooClient) -> None:
    """The servers delete a name's node after its last claim; tokens still grow."""
    with holdfast.connect(server.url, namespace=namespace) as locks:
        with locks.lock("name") as lease:
            first = lease.token
        wait_until("its end", lambda: not kazoo.exists(f"/{namespace}/locks/name"))
        with locks.lock("name") as lease:
            assert lease.token > first
        assert nodes_of(kazoo, f"/{namespace}/locks/name") == []


def test_the_queue_is_emptied_before_its_counter_ends(
    server: QuickServer, namespace: str, kazoo: KazooClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New claims don't join; the last release deletes the name's node."""
    monkeypatch.setattr(zookeeper, "SEQUENCE_LIMIT", 3)
    tokens = []
    with holdfast.connect(server.url, namespace=namespace) as locks:
        for _ in range(8):
            with locks.lock("name") as lease:
                tokens.append(lease.token)
        with holdfast.connect(server.url, namespace=namespace) as others:
            lock = others.lock("name")
            for _ in range(4):
                with locks.lock("name") as lease:
                    tokens.append(lease.token)
                    assert not lock.acquire(timeout=1)
                with lock as lease:
                    tokens.append(lease.token)
    assert tokens == sorted(set(tokens))
    assert nodes_of(kazoo, f"/{namespace}/locks/name") == []


def test_a_newer_version_is_not_touched(
    server: QuickServer, namespace: str, kazoo: KazooClient
) -> None:
    """Its nodes stay, and no node of ours is left beside them."""
    kazoo.create(f"/{namespace}/locks/name/2.something", makepath=True)
    with holdfast.connect(server.url, namespace=namespace) as locks:
        with pytest.raises(Incompatible):
            locks.lock("name").acquire()
        assert kazoo.get_children(f"/{namespace}/locks/name") == ["2.something"]
