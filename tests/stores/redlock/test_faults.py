"""One of five nodes is killed, stopped or wiped: no hold is lost, and it is used again later."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import BackendUnavailable
from holdfast.testing import Flavour
from holdfast.testing.processes import Process
from servers.process import wait_until
from servers.redis import RedisServer
from stores.client_runner import run_with_clients
from stores.redis.helpers import blocking_and_asyncio, until
from stores.redlock import helpers
from stores.redlock.helpers import KEY, Nodes, held_by

pytestmark = pytest.mark.faults

three, five = helpers.three, helpers.five
SOON = 60.0
TTL = 10.0

FAULTS: dict[str, Callable[[RedisServer], None]] = {
    "killed": RedisServer.kill,
    "stopped": RedisServer.pause,
    "wiped": RedisServer.wipe,
}


@pytest.mark.parametrize("fault", FAULTS)
@blocking_and_asyncio
def test_one_of_five_nodes_may_fail(five: Nodes, flavour: Flavour, fault: str) -> None:
    """The hold stays, other claims are refused, and tokens keep growing."""

    async def body(ours: Any, theirs: Any) -> None:
        async with ours.lock("name") as held:
            FAULTS[fault](five.nodes[0])
            await held.extend()
            assert await theirs.lock("name").acquire(blocking=False) is None
        tokens = [held.token]
        for number in range(30):
            async with (ours, theirs)[number % 2].lock("name", timeout=10) as lease:
                tokens.append(lease.token)
        assert tokens == sorted(set(tokens))

    run_with_clients(flavour, body, five.url, five.url, ttl=TTL)


@blocking_and_asyncio
def test_a_stopped_node_is_left_out_and_used_again(five: Nodes, flavour: Flavour) -> None:
    """A node that does not answer gets no more requests; when it answers, it votes again."""
    stopped = five.nodes[0]

    async def body(client: Any) -> None:
        async with client.lock("name"):
            pass
        node = client._engine.store.nodes.members[0]
        stopped.pause()
        await _hold_until(client, lambda: bool(node.down))
        stopped.resume()
        await _hold_until(client, lambda: not node.down)
        async with client.lock("name"):
            await until(lambda: held_by(stopped))

    run_with_clients(flavour, body, five.url, ttl=TTL)


def test_a_node_is_used_again_although_its_reconnection_was_interrupted(
    five: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C interrupts the start of the thread that reconnects: a later call starts another."""
    stopped = five.nodes[0]
    start = threading.Thread.start

    def torn(thread: threading.Thread) -> None:
        if thread.name == "holdfast-redlock-revive":
            raise KeyboardInterrupt
        start(thread)

    def hold_until(locks: holdfast.Locks, condition: Callable[[], bool]) -> None:
        def held() -> bool:
            with locks.lock("name", timeout=10):
                return condition()

        wait_until("the node", held)

    with holdfast.connect(five.url, ttl=TTL) as locks:
        with locks.lock("name"):
            pass
        node = locks._engine.store.nodes.members[0]  # type: ignore[attr-defined]
        stopped.pause()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", torn)
            with pytest.raises(KeyboardInterrupt):
                hold_until(locks, lambda: False)
        stopped.resume()
        hold_until(locks, lambda: not node.down)


async def _hold_until(client: Any, condition: Callable[[], bool]) -> None:
    """Acquire and release the name in a loop until the condition holds. The test's own timeout
    bounds the loop."""
    over = False
    while not over:
        async with client.lock("name", timeout=10):
            over = condition()


@blocking_and_asyncio
def test_a_renewal_restores_a_hold_on_a_wiped_node(five: Nodes, flavour: Flavour) -> None:
    """A hold is restored where a node lost it, but not where the node has a higher counter."""
    wiped = five.nodes[0]

    async def body(client: Any) -> None:
        async with client.lock("name") as lease:
            wiped.wipe()
            while wiped.ask("HGET", KEY, "xt") != str(lease.token):
                await _extended(lease)
            wiped.ask("HDEL", KEY, "x", "xe", "xt", "xl", "xs", "xa")
            wiped.ask("HSET", KEY, "c", str(lease.token + 1))
            await _extended(lease)
            assert not held_by(wiped)

    run_with_clients(flavour, body, five.url, ttl=TTL)


async def _extended(lease: Any) -> None:
    """Extend a hold. Try again while it is held: on a busy machine a majority may be late."""
    while True:
        try:
            await lease.extend()
        except BackendUnavailable:
            lease.check()
        else:
            return


@blocking_and_asyncio
def test_readers_and_slots_survive_a_wiped_node(five: Nodes, flavour: Flavour) -> None:
    """What a majority holds stays held: no writer is granted, no slot is granted twice."""

    async def body(ours: Any, theirs: Any) -> None:
        async with ours.rwlock("name").read(), ours.semaphore("slots", 2) as mine:
            five.nodes[0].wipe()
            five.nodes[1].kill()
            assert await theirs.rwlock("name").write().acquire(blocking=False) is None
            async with theirs.semaphore("slots", 2, timeout=5) as other:
                assert not set(mine.slots) & set(other.slots)
                assert await theirs.semaphore("slots", 2).acquire(blocking=False) is None

    run_with_clients(flavour, body, five.url, five.url, ttl=TTL)


@blocking_and_asyncio
def test_the_intent_of_a_killed_writer_expires(five: Nodes, flavour: Flavour) -> None:
    """An intent keeps readers out while its writer waits, and ends soon after the writer died."""
    writer = Process(five.url, flavour, ttl=TTL)
    try:
        with (
            holdfast.connect(five.url, ttl=TTL) as ours,
            holdfast.connect(five.url, ttl=TTL) as theirs,
            ours.rwlock("name").read() as first,
        ):
            writer.send("acquire", name="name")
            wait_until("the intent", lambda: all(map(_has_intent, five.nodes)))
            assert theirs.rwlock("name").read().acquire(blocking=False) is None
            writer.kill()
            with theirs.rwlock("name", timeout=SOON).read():
                assert first.held
    finally:
        writer.close()


def _has_intent(node: RedisServer) -> bool:
    return node.ask("HEXISTS", KEY, "i") == 1


@blocking_and_asyncio
def test_two_wiped_nodes_of_three_grant_nothing(three: Nodes, flavour: Flavour) -> None:
    """The quarantine keeps a majority that lost its data from granting a second hold."""

    async def body(ours: Any, theirs: Any) -> None:
        lease = await ours.lock("name", renew=False).acquire()
        for node in three.nodes[:2]:
            node.wipe()
        assert await theirs.lock("name").acquire(timeout=1) is None
        assert lease.held
        await lease.release()

    run_with_clients(flavour, body, three.url, three.url, ttl=TTL)


def test_tokens_grow_under_contention_and_faults(five: Nodes, tmp_path: Path) -> None:
    """Four processes (two blocking, two asyncio) while one node after the other fails."""
    path, enough = tmp_path / "tokens", tmp_path / "enough"
    script = Path(__file__).with_name("contender.py")
    words = [sys.executable, str(script), five.url, str(path), str(enough)]
    workers = [subprocess.Popen([*words, flavour]) for flavour in Flavour for _ in range(2)]
    try:
        wait_until("the first holds", path.exists)
        five.nodes[0].wipe()
        five.nodes[1].pause()
        _wait_for_more(path)
        five.nodes[1].resume()
        _wait_for_more(path)
        five.nodes[2].kill()
        _wait_for_more(path)
        enough.touch()
        assert [worker.wait(60) for worker in workers] == [0] * 4
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    tokens = [int(line) for line in path.read_text().split()]
    assert len(tokens) > 60
    assert tokens == sorted(set(tokens))


def _wait_for_more(path: Path) -> None:
    """Returns after twenty more holds."""
    already = len(path.read_text().split())
    wait_until("more holds", lambda: len(path.read_text().split()) >= already + 20)
