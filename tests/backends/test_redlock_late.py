"""Nodes that answer late: their votes count, and they neither lose a hold nor a wake-up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

import holdfast
from backends.redis_bench import scripts_run, somebody_rests
from harnesses.redlock import mark_as_new
from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.runtimes.blocking import BlockingRuntime
from holdfast.runtimes.clock import now
from holdfast.url import open_store
from servers.ensemble import Ensemble
from servers.process import wait_until
from servers.proxy import Proxy
from servers.redis import RedisServer

KEY = "holdfast:redlock:{name}"


class Nodes(Ensemble[RedisServer]):
    """Masters, each behind a proxy, marked as new."""

    def __init__(self, count: int) -> None:
        super().__init__([RedisServer() for _ in range(count)])
        self.proxies: list[Proxy] = []

    def wait_ready(self) -> None:
        super().wait_ready()
        self.proxies = [Proxy(node) for node in self.nodes]
        mark_as_new(self.url)

    @property
    def url(self) -> str:
        return f"redlock://{self.hosts}?max_ttl=300"

    @property
    def proxied_url(self) -> str:
        hosts = (f"{proxy.server.host}:{proxy.port}" for proxy in self.proxies)
        return f"redlock://{','.join(hosts)}?max_ttl=300"

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        super().close()


@pytest.fixture
def three() -> Iterator[Nodes]:
    """Three masters."""
    with Nodes(3) as nodes:
        yield nodes


@pytest.fixture
def five() -> Iterator[Nodes]:
    """Five masters."""
    with Nodes(5) as nodes:
        yield nodes


def test_a_late_node_votes_although_it_is_not_waited_for(three: Nodes) -> None:
    """Also the first time, when it has not run the script before."""
    with holdfast.connect(three.proxied_url, ttl=10) as locks:
        locks.inspect("other")  # opens the connections
        three.proxies[2].hold_replies()
        with locks.lock("name"):
            wait_until("the late vote", lambda: _held_by(three.nodes[2]))
        wait_until("the late release", lambda: not _held_by(three.nodes[2]))
        three.proxies[2].let_replies()


def _held_by(node: RedisServer) -> bool:
    return node.ask("HEXISTS", KEY, "x") == 1


LOCKS: dict[str, Callable[[holdfast.Locks], holdfast.Lock]] = {
    "lock": lambda locks: locks.lock("name", renew=False),
    "reader": lambda locks: locks.rwlock("name", renew=False).read(),
    "slots": lambda locks: locks.semaphore("name", 3, permits=2, renew=False),
}


@pytest.mark.parametrize("kind", LOCKS)
def test_votes_that_it_never_had_lose_no_hold(five: Nodes, kind: str) -> None:
    """Two of five never voted for it, one forgot it, one is gone: nobody else was let in."""
    with holdfast.connect(five.proxied_url, ttl=10) as locks, holdfast.connect(five.url) as others:
        locks.inspect("other")
        for node in five.nodes:
            node.ask("SCRIPT", "FLUSH")
        for proxy in five.proxies[3:]:
            proxy.hold_replies()
        lease = LOCKS[kind](locks).acquire()
        assert lease is not None
        assert [node.ask("EXISTS", KEY) for node in five.nodes] == [1, 1, 1, 0, 0]
        for proxy in five.proxies[3:]:
            proxy.let_replies()
        five.nodes[0].wipe()
        five.nodes[1].kill()
        assert others.lock("name").acquire(blocking=False) is None if kind != "slots" else True
        assert lease.release() is True
        assert not lease.lost


def test_a_hold_that_was_broken_is_told_as_lost(three: Nodes) -> None:
    """Nodes that know that it is over say so, also those that never voted for it."""
    with holdfast.connect(three.url, ttl=10) as locks:
        lease = locks.lock("name").acquire()
        assert lease is not None
        locks.break_lock("name", reason="a test")
        assert lease.release() is False


def test_a_writer_that_won_without_a_node_keeps_no_readers_out_there(three: Nodes) -> None:
    """Its wish to write goes with it, also where readers were in its way to the last."""
    left_behind = three.nodes[2]
    with holdfast.connect(three.url, ttl=60) as ours, holdfast.connect(three.url) as theirs:
        reader = theirs.rwlock("name", renew=False).read().acquire()
        assert reader is not None
        for node in three.nodes[:2]:
            node.ask("DEL", KEY)
        with ours.rwlock("name").write():
            wait_until("the wish", lambda: left_behind.ask("HEXISTS", KEY, "i") == 1)
        wait_until("its end", lambda: left_behind.ask("HEXISTS", KEY, "i") == 0)
        assert reader.release() is False


def test_a_renewal_that_comes_after_the_release_brings_nothing_back(three: Nodes) -> None:
    """Not even on a node that never had it."""
    backend = open_store(three.url, Settings()).backend(BlockingRuntime())
    try:
        claim = Claim("name", Mode.EXCLUSIVE, 1, 0, 10.0, "owner", "[]")
        grant = run_now(backend.attempt(claim, join=False))
        assert isinstance(grant, Grant)
        three.nodes[2].ask("DEL", KEY)
        assert run_now(backend.release(grant)) is True
        renewal = run_now(backend.renew([grant], [], until=now() + 5))
        assert list(renewal.lost) == ["owner"]
        wait_until("the renewal", lambda: not any(map(_held_by, three.nodes)))
    finally:
        run_now(backend.close())


def test_a_node_whose_own_vote_is_higher_is_not_raised(three: Nodes) -> None:
    """A vote that was not heard of may be above the token that the others agree on: that node
    keeps it, and does not count for the lower one."""
    with holdfast.connect(three.proxied_url, ttl=10) as locks:
        with locks.lock("name") as first:
            pass
        ahead = first.token + 3_600_000_000
        three.nodes[1].ask("HSET", KEY, "c", str(ahead))
        three.nodes[2].ask("HSET", KEY, "c", str(ahead + 7))
        before = scripts_run(three.nodes[2])
        three.proxies[2].hold_replies()
        with locks.lock("name") as second:
            assert second.token == ahead + 1
            # The vote, and the request to raise it.
            wait_until("the requests", lambda: scripts_run(three.nodes[2]) == before + 2)
            tokens = [node.ask("HGET", KEY, "xt") for node in three.nodes]
            assert tokens == [str(ahead + 1), str(ahead + 1), str(ahead + 8)]
        three.proxies[2].let_replies()
        with locks.lock("name") as third:
            assert third.token > second.token


def test_who_is_called_before_the_others_have_let_go_comes_again(
    three: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node tells of a release that has not reached the others yet: nobody calls again."""
    monkeypatch.setattr("holdfast.core.acquire.RECHECK_SECONDS", (60.0, 61.0))
    got = threading.Event()
    with (
        holdfast.connect(three.proxied_url, ttl=300) as ours,
        holdfast.connect(three.url, ttl=300) as theirs,
        ThreadPoolExecutor() as pool,
    ):

        def wait_for_it() -> None:
            with theirs.lock("name", timeout=120):
                got.set()

        lease = ours.lock("name", renew=False).acquire()
        assert lease is not None
        waiting = pool.submit(wait_for_it)
        # Long enough for the hold not to be taken for an attempt that may come to nothing.
        wait_until("the waiter to rest", partial(somebody_rests, three.nodes[0]))
        for proxy in three.proxies[1:]:
            proxy.stall()
        before = scripts_run(three.nodes[1])
        releasing = pool.submit(lease.release)
        wait_until("the first node to let go", lambda: not _held_by(three.nodes[0]))
        wait_until("the waiter to come", lambda: scripts_run(three.nodes[1]) > before)
        assert not got.is_set()
        for proxy in three.proxies[1:]:
            proxy.resume()
        assert releasing.result(30) is True
        assert got.wait(30)  # long before the re-check
        waiting.result(30)
