"""One of five nodes is killed, stopped or wiped: nothing is lost, and it comes back by itself."""

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
from stores.clients import through
from stores.redis.bench import blocking_and_asyncio, until
from stores.redlock import bench as redlock_bench
from stores.redlock.bench import KEY, Nodes, held_by

pytestmark = pytest.mark.faults

three, five = redlock_bench.three, redlock_bench.five
SOON = 60.0
TTL = 10.0

FAULTS: dict[str, Callable[[RedisServer], None]] = {
    "killed": RedisServer.kill,
    "stopped": RedisServer.pause,
    "wiped": RedisServer.wipe,
}


@pytest.mark.parametrize("fault", FAULTS)
@blocking_and_asyncio
def test_one_of_five_is_not_missed(five: Nodes, flavour: Flavour, fault: str) -> None:
    """A hold stays held, others stay out, tokens go on growing."""

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

    through(flavour, body, five.url, five.url, ttl=TTL)


@blocking_and_asyncio
def test_a_stopped_node_is_left_out_and_comes_back(five: Nodes, flavour: Flavour) -> None:
    """Once it is known to hang nothing is sent there; afterwards it votes again."""
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

    through(flavour, body, five.url, ttl=TTL)


def test_a_node_comes_back_although_its_reviver_was_interrupted(
    five: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the start of the thread that tries it: somebody else tries it later."""
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
    """Takes the name and gives it back, over and over: it is bounded by the test's own time."""
    over = False
    while not over:
        async with client.lock("name", timeout=10):
            over = condition()


@blocking_and_asyncio
def test_a_renewal_heals_a_wiped_node(five: Nodes, flavour: Flavour) -> None:
    """A node that forgot a hold gets it back; who was superseded does not."""
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

    through(flavour, body, five.url, ttl=TTL)


async def _extended(lease: Any) -> None:
    """On a busy machine a majority may be late once; as long as it is held, it is tried again."""
    while True:
        try:
            await lease.extend()
        except BackendUnavailable:
            lease.check()
        else:
            return


@blocking_and_asyncio
def test_readers_and_slots_survive_a_wiped_node(five: Nodes, flavour: Flavour) -> None:
    """What a majority holds is held: no writer gets in, no slot is given twice."""

    async def body(ours: Any, theirs: Any) -> None:
        async with ours.rwlock("name").read(), ours.semaphore("slots", 2) as mine:
            five.nodes[0].wipe()
            five.nodes[1].kill()
            assert await theirs.rwlock("name").write().acquire(blocking=False) is None
            async with theirs.semaphore("slots", 2, timeout=5) as other:
                assert not set(mine.slots) & set(other.slots)
                assert await theirs.semaphore("slots", 2).acquire(blocking=False) is None

    through(flavour, body, five.url, five.url, ttl=TTL)


@blocking_and_asyncio
def test_the_wish_of_a_killed_writer_ends(five: Nodes, flavour: Flavour) -> None:
    """It keeps readers out for a writer's sake, and must not outlive one that is gone."""
    writer = Process(five.url, flavour, ttl=TTL)
    try:
        with (
            holdfast.connect(five.url, ttl=TTL) as ours,
            holdfast.connect(five.url, ttl=TTL) as theirs,
            ours.rwlock("name").read() as first,
        ):
            writer.send("acquire", name="name")
            wait_until("the wish", lambda: all(map(_wished_for, five.nodes)))
            assert theirs.rwlock("name").read().acquire(blocking=False) is None
            writer.kill()
            with theirs.rwlock("name", timeout=SOON).read():
                assert first.held
    finally:
        writer.close()


def _wished_for(node: RedisServer) -> bool:
    return node.ask("HEXISTS", KEY, "i") == 1


@blocking_and_asyncio
def test_two_wiped_nodes_of_three_let_nobody_in(three: Nodes, flavour: Flavour) -> None:
    """The quarantine keeps a majority that forgot from electing a second holder."""

    async def body(ours: Any, theirs: Any) -> None:
        lease = await ours.lock("name", renew=False).acquire()
        for node in three.nodes[:2]:
            node.wipe()
        assert await theirs.lock("name").acquire(timeout=1) is None
        assert lease.held
        await lease.release()

    through(flavour, body, three.url, three.url, ttl=TTL)


def test_tokens_grow_under_contention_and_faults(five: Nodes, tmp_path: Path) -> None:
    """Four processes, two of each kind, and one node after the other that goes and comes back."""
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
