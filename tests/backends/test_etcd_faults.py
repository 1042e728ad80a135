"""Three etcd nodes, and what happens to them."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

import holdfast
from backends.etcd_bench import LinkedTrio, hold_once
from backends.recovery import Recovery, Tell
from backends.zookeeper_bench import Believer
from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.testing import Flavour
from holdfast.testing.processes import Process
from servers.etcd import EtcdServer
from servers.missing import ServerMissing, required
from servers.proxy import Proxy
from servers.registry import Servers

pytestmark = pytest.mark.faults

TTL = 3.0
CALM = 20.0
"""The ttl of those who are not to lose what they hold."""
SOON = 60.0
"""Far more than two ttls and an election, on a machine that is busy: what counts is the order."""
CHECK = 0.5
"""How often etcd looks for leases that have ended."""


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
    running.mend()


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


def _next_token(url: str, namespace: str, seconds: float) -> tuple[int, float]:
    """Takes the lock; the token, and when the block was entered."""
    with (
        holdfast.connect(url, namespace=namespace, ttl=CALM, patience=seconds) as locks,
        locks.lock("name", timeout=seconds) as lease,
    ):
        return lease.token, now()


def _recovers(url: str, namespace: str, bound: float, tell: Tell) -> tuple[int, float]:
    """As above, within what is documented."""
    with Recovery(url, namespace) as recovery:
        found = _next_token(url, namespace, SOON)
        recovery.within(bound, tell)
    return found


def _loses(believer: Believer, url: str, namespace: str, tell: Tell) -> None:
    """The next one gets it within the bound, after the last one has stopped believing."""
    with closing(believer):
        token, entered = _recovers(url, namespace, 2 * TTL + CHECK, tell)
        assert token > believer.token
        assert believer.lost(SOON), "two held at the same time"
        assert believer.believed_until <= entered
        with holdfast.connect(url, namespace=namespace) as locks:
            standing = locks.inspect("name")
            assert (standing.holders, standing.waiters) == ((), ())


def test_a_hold_survives_its_leader(trio: LinkedTrio, namespace: str) -> None:
    """A killed leader costs an election, not the hold."""
    with closing(Believer(trio.url, namespace, "name", 60.0)) as believer:
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
        url = trio.others(leader)
        with (
            holdfast.connect(url, namespace=namespace, ttl=CALM, patience=SOON) as locks,
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


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_a_minority_is_cut_off_with_its_client(
    trio: LinkedTrio, namespace: str, role: str, record_property: Tell
) -> None:
    """An old leader goes on answering keep-alives for a while; that proves nothing too much."""
    lonely = trio.leader() if role == "leader" else trio.follower()
    believer = Believer(lonely.url, namespace, "name", TTL)
    trio.isolate(lonely)
    _loses(believer, trio.others(lonely), namespace, record_property)


@pytest.mark.parametrize("mode", ["lock", "semaphore"])
def test_the_reply_of_the_grant_is_lost(trio: LinkedTrio, namespace: str, mode: str) -> None:
    """It is found again by its owner: one hold, and nothing left of it afterwards."""
    with (
        Proxy(trio.nodes[0]) as proxy,
        holdfast.connect(proxy.url, namespace=namespace, ttl=CALM) as locks,
        holdfast.connect(trio.url, namespace=namespace, ttl=TTL) as others,
    ):
        lock = locks.lock("name") if mode == "lock" else locks.semaphore("name", 2)
        with lock:
            pass
        dropped = proxy.drop_next_reply(matching=b"/v3/kv/txn")
        with lock as lease:
            assert dropped.is_set()
            standing = others.inspect("name")
            assert [holder.token for holder in standing.holders] == [lease.token]
            assert standing.waiters == ()
        standing = others.inspect("name")
        assert (standing.holders, standing.waiters) == ((), ())


def test_a_wait_outlives_compaction_and_its_leader(trio: LinkedTrio, namespace: str) -> None:
    """History is thrown away and the leader killed while somebody waits: it is woken after."""
    with holdfast.connect(trio.url, namespace=namespace, ttl=60) as ours:
        held = ours.lock("name").acquire()
        assert held
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(_next_token, trio.url, namespace, SOON)
            while not ours.inspect("name").waiters:
                pass
            node = trio.follower()
            puts = [node.ask("/v3/kv/put", {"key": "YQ==", "value": "YQ=="}) for _ in range(5)]
            node.ask("/v3/kv/compaction", {"revision": puts[-1]["header"]["revision"]})
            trio.leader().kill()
            with ours.lock("other", timeout=SOON):
                pass
            held.check()
            assert held.release() is True
            token, _ = later.result()
            assert token > held.token


def test_no_majority_for_three_ttls(
    trio: LinkedTrio, namespace: str, record_property: Tell
) -> None:
    """Nobody acquires, the holder learns it by its deadline, and work goes on afterwards."""
    with closing(Believer(trio.url, namespace, "name", TTL)) as believer:
        kept = trio.follower()
        stopped = [node for node in trio.nodes if node is not kept]
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
        token, _ = _recovers(trio.url, namespace, 2 * TTL + CHECK, record_property)
        assert token > believer.token


def test_a_client_is_stopped_past_its_session(
    trio: LinkedTrio, namespace: str, record_property: Tell
) -> None:
    """Its first word after it goes on is that the hold is lost."""
    asyncio.run(_stopped_past_its_session(trio.url, namespace, record_property))


async def _stopped_past_its_session(url: str, namespace: str, tell: Tell) -> None:
    process = Process(url, Flavour.BLOCKING, namespace=namespace, ttl=TTL)
    try:
        token = await process.ask("acquire", name="name")
        process.stop()
        later, _ = await asyncio.to_thread(_recovers, url, namespace, TTL + CHECK, tell)
        assert later > token
        process.go_on()
        state = await process.ask("state", name="name")
        assert (state["held"], state["lost"]) == (False, True)
        assert await process.ask("release", name="name") is False
    finally:
        process.go_on()
        process.close()


def test_one_node_after_the_other_is_restarted(trio: LinkedTrio, namespace: str) -> None:
    """A rolling restart costs neither a hold nor the order of tokens."""
    with holdfast.connect(trio.url, namespace=namespace, ttl=60) as locks:
        kept = locks.lock("kept").acquire()
        assert kept
        tokens = []
        for node in trio.nodes:
            node.restart()
            with locks.lock("name", timeout=SOON) as lease:
                tokens.append(lease.token)
        assert tokens == sorted(set(tokens))
        kept.check()
        assert kept.release() is True


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_silent_socket_is_replaced(servers: Servers, namespace: str, flavour: Flavour) -> None:
    """A WebSocket on which nothing comes any more is given up, and waiters are woken again."""
    server = servers.of(EtcdServer)
    with Proxy(server) as proxy, holdfast.connect(server.url, namespace=namespace) as ours:
        held = ours.lock("name").acquire()
        assert held
        got = threading.Event()
        thread = threading.Thread(target=hold_once, args=(proxy.url, namespace, flavour, got))
        thread.start()
        while not ours.inspect("name").waiters:
            pass
        proxy.stall()
        assert not got.wait(7)
        proxy.cut()  # what was sent meanwhile never arrives
        proxy.resume()
        assert not got.wait(4)
        assert held.release()
        assert got.wait(SOON)
        thread.join()
