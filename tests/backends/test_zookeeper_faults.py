"""Three ZooKeeper servers, and what happens to them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import closing

import pytest

import holdfast
from backends.recovery import Recovery, Tell
from backends.zookeeper_bench import TICK_SECONDS, Believer, LinkedTrio, QuickServer
from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.testing import Flavour
from holdfast.testing.processes import Process
from holdfast.wires.zookeeper_asks import Create
from servers.missing import ServerMissing, required
from servers.proxy import Proxy

pytestmark = pytest.mark.faults

TTL = 2.0
CALM = 20.0
"""The ttl of those who are not to lose what they hold."""
SOON = 60.0
"""Far more than two sessions and elections, on a machine that is busy: what counts is the order."""
SESSION = 1.1 * TTL + 2 * TICK_SECONDS
"""After what a session ends, as the servers round it. A new leader counts it anew."""


@pytest.fixture(scope="module")
def running() -> Iterator[LinkedTrio]:
    trio = LinkedTrio()
    try:
        trio.start()
    except ServerMissing as missing:
        trio.close()
        if required():
            raise
        pytest.skip(str(missing))
    yield trio
    trio.close()


@pytest.fixture
def trio(running: LinkedTrio) -> Iterator[LinkedTrio]:
    yield running
    for node in running.nodes:
        running.join(node)
        if node.alive and node.paused:
            node.resume()
    running.launch()
    running.wait_ready()


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


def _next_token(url: str, namespace: str, seconds: float) -> tuple[int, float]:
    """Takes the lock; the token, and when the block was entered."""
    door = holdfast.connect(url, namespace=namespace, ttl=CALM, patience=seconds)
    with door as locks, locks.lock("name", timeout=seconds) as lease:
        return lease.token, now()


def _recovers(url: str, namespace: str, bound: float, tell: Tell) -> tuple[int, float]:
    """As above, within what is documented."""
    with Recovery(url, namespace) as recovery:
        found = _next_token(url, namespace, SOON)
        recovery.within(bound, tell)
    return found


def test_a_hold_survives_its_leader(trio: LinkedTrio, namespace: str) -> None:
    """A killed leader costs an election, not the hold."""
    with closing(Believer(trio.url, namespace, "name", 30.0)) as believer:
        trio.leader().kill()
        with (
            holdfast.connect(trio.url, namespace=namespace, ttl=CALM, patience=SOON) as locks,
            locks.lock("other", timeout=SOON),  # there is a leader again
        ):
            assert not locks.lock("name").acquire(timeout=0)
        assert believer.lease is not None
        believer.lease.check(at_least=1.0)
        assert believer.lease.release() is True
    token, _ = _next_token(trio.url, namespace, SOON)
    assert token > believer.token


def test_the_leader_stops(trio: LinkedTrio, namespace: str) -> None:
    """A leader that hangs is replaced; whoever holds next, nobody holds at the same time."""
    believer = Believer(trio.url, namespace, "name", TTL)
    with closing(believer):
        leader = trio.leader()
        leader.pause()
        with (
            holdfast.connect(trio.others(leader), namespace=namespace, ttl=CALM) as locks,
            locks.lock("other", timeout=SOON) as lease,
        ):
            assert lease.token > believer.token
        leader.resume()
        if not believer.lost(0.0):
            assert believer.lease is not None
            assert believer.lease.release() is True
        token, entered = _next_token(trio.url, namespace, SOON)
        assert token > believer.token
        assert believer.believed_until <= entered


@pytest.mark.parametrize("turn", range(3))
def test_a_follower_is_cut_off_with_its_client(
    trio: LinkedTrio, namespace: str, turn: int, record_property: Tell
) -> None:
    """The client's server still answers and calls it connected: no proof of anything."""
    lonely = trio.follower()
    with closing(Believer(lonely.url, namespace, "name", TTL)) as believer:
        # At another moment between two renewals each time.
        assert not believer.lost(turn * TTL / 9)
        trio.isolate(lonely)
        url = trio.others(lonely)
        token, entered = _recovers(url, namespace, SESSION, record_property)
        assert token > believer.token
        assert believer.lost(SOON), "two held at the same time"
        assert believer.believed_until <= entered
        trio.join(lonely)


def test_the_leader_is_cut_off_with_its_client(
    trio: LinkedTrio, namespace: str, record_property: Tell
) -> None:
    """An old leader that has not noticed yet answers everything but a write."""
    lonely = trio.leader()
    with closing(Believer(lonely.url, namespace, "name", TTL)) as believer:
        trio.isolate(lonely)
        cut = now()
        assert believer.lost(SOON)
        assert believer.believed_until <= cut + TTL
        trio.join(lonely)
        token, entered = _recovers(trio.url, namespace, 2 * SESSION, record_property)
        assert token > believer.token
        assert believer.believed_until <= entered


def test_no_majority_for_three_ttls(
    trio: LinkedTrio, namespace: str, record_property: Tell
) -> None:
    """Nobody acquires, the holder learns it by its deadline, and work goes on afterwards."""
    with closing(Believer(trio.url, namespace, "name", TTL)) as believer:
        stopped = [node for node in trio.nodes if node is not trio.follower()][:2]
        for node in stopped:
            node.pause()
        began = now()
        with (
            holdfast.connect(trio.url, namespace=namespace, ttl=TTL, patience=3 * TTL) as locks,
            pytest.raises(BackendUnavailable),
        ):
            locks.lock("free", timeout=None).acquire()
        assert now() - began >= 2 * TTL
        assert believer.lost(SOON)
        assert believer.believed_until <= began + TTL + 0.05
        for node in stopped:
            node.resume()
        token, _ = _recovers(trio.url, namespace, 2 * SESSION, record_property)
        assert token > believer.token


async def _stopped_past_its_session(url: str, namespace: str, tell: Tell) -> None:
    process = Process(url, Flavour.BLOCKING, namespace=namespace, ttl=TTL)
    try:
        token = await process.ask("acquire", name="name")
        process.stop()
        later, _ = await asyncio.to_thread(_recovers, url, namespace, SESSION, tell)
        assert later > token
        process.go_on()
        state = await process.ask("state", name="name")
        assert (state["held"], state["lost"]) == (False, True)
        assert await process.ask("release", name="name") is False
    finally:
        process.go_on()
        process.close()


def test_a_client_is_stopped_past_its_session(
    trio: LinkedTrio, namespace: str, record_property: Tell
) -> None:
    """Its first word after it goes on is that the hold is lost."""
    asyncio.run(_stopped_past_its_session(trio.url, namespace, record_property))


def test_servers_that_lost_everything(namespace: str) -> None:
    """They refuse a client that has seen more than they know: it starts anew, by itself."""
    with (
        QuickServer() as server,
        holdfast.connect(server.url, namespace=namespace, ttl=TTL) as locks,
    ):
        with locks.lock("name"):
            pass
        server.wipe()
        with locks.lock("name", timeout=60) as lease:
            assert lease.held


def test_a_create_that_lands_late_leaves_nothing(trio: LinkedTrio, namespace: str) -> None:
    """A second node of the same owner, made after its hold was released, is deleted."""
    with Proxy(trio.nodes[0]) as proxy, holdfast.connect(proxy.url, namespace=namespace) as locks:
        with locks.lock("name", ttl=5) as lease:
            pass
        dropped = proxy.drop_next_reply(matching=b"/name/1.x")
        with locks.lock("name", ttl=5) as lease:
            assert dropped.is_set()
            node = lease._hold.grant.ref[2]
        session = locks._door.store.sessions[5]  # type: ignore[attr-defined]
        store = locks._door.store
        session.send(Create(node.rpartition(".")[0] + ".", b"", store.acl))  # type: ignore[attr-defined]
        with locks.lock("name", timeout=20):
            pass


@pytest.mark.parametrize("mode", ["lock", "semaphore"])
def test_the_reply_of_the_create_is_lost(trio: LinkedTrio, namespace: str, mode: str) -> None:
    """The node is found again by its owner: one hold, and nothing left of it afterwards."""
    with Proxy(trio.nodes[0]) as proxy, holdfast.connect(proxy.url, namespace=namespace) as locks:
        lock = locks.lock("name") if mode == "lock" else locks.semaphore("name", 2)
        with lock:
            pass
        for pattern in (b"/name/1.", b"/name/1.k." if mode == "semaphore" else b"/name/1.x"):
            dropped = proxy.drop_next_reply(matching=pattern)
            with lock as lease:
                assert dropped.is_set()
                with holdfast.connect(trio.url, namespace=namespace) as others:
                    standing = others.inspect("name")
                    assert [holder.token for holder in standing.holders] == [lease.token]
                    assert standing.waiters == ()
        with holdfast.connect(trio.url, namespace=namespace) as others:
            standing = others.inspect("name")
            assert (standing.holders, standing.waiters) == ((), ())
