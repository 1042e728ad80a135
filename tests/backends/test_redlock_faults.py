"""One of five nodes is killed, stopped or wiped: nothing is lost, and it comes back by itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast
from harnesses.redlock import mark_as_new
from holdfast.testing import Flavour
from holdfast.testing.processes import Process
from servers.ensemble import Ensemble
from servers.process import wait_until
from servers.redis import RedisServer

pytestmark = pytest.mark.faults

KEY = "holdfast:redlock:{name}"
SOON = 60.0


@pytest.fixture
def nodes() -> Iterator[Ensemble[RedisServer]]:
    """Five masters that keep nothing, marked as new."""
    with Ensemble([RedisServer() for _ in range(5)]) as ensemble:
        mark_as_new(_url(ensemble))
        yield ensemble


def _url(nodes: Ensemble[RedisServer]) -> str:
    return f"redlock://{nodes.hosts}?max_ttl=30"


FAULTS: dict[str, Callable[[RedisServer], None]] = {
    "killed": RedisServer.kill,
    "stopped": RedisServer.pause,
    "wiped": RedisServer.wipe,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_of_five_is_not_missed(nodes: Ensemble[RedisServer], fault: str) -> None:
    """A hold stays held, others stay out, tokens go on growing."""
    with (
        holdfast.connect(_url(nodes), ttl=10) as ours,
        holdfast.connect(_url(nodes), ttl=10) as theirs,
    ):
        with ours.lock("name") as held:
            FAULTS[fault](nodes.nodes[0])
            held.extend()
            assert theirs.lock("name").acquire(blocking=False) is None
        tokens = [held.token]
        for number in range(30):
            with (ours, theirs)[number % 2].lock("name", timeout=10) as lease:
                tokens.append(lease.token)
        assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("fault", FAULTS)
def test_one_of_five_is_not_missed_async(nodes: Ensemble[RedisServer], fault: str) -> None:
    """The same through the asyncio door."""
    asyncio.run(_not_missed(nodes, FAULTS[fault]))


async def _not_missed(nodes: Ensemble[RedisServer], fault: Callable[[RedisServer], None]) -> None:
    async with (
        holdfast.connect_async(_url(nodes), ttl=10) as ours,
        holdfast.connect_async(_url(nodes), ttl=10) as theirs,
    ):
        async with ours.lock("name") as held:
            fault(nodes.nodes[0])
            await held.extend()
            assert await theirs.lock("name").acquire(blocking=False) is None
        tokens = [held.token]
        for number in range(30):
            async with (ours, theirs)[number % 2].lock("name", timeout=10) as lease:
                tokens.append(lease.token)
        assert tokens == sorted(set(tokens))


def test_a_stopped_node_is_left_out_and_comes_back(nodes: Ensemble[RedisServer]) -> None:
    """Once it is known to hang nothing is sent there; afterwards it votes again."""
    stopped = nodes.nodes[0]
    with holdfast.connect(_url(nodes), ttl=10) as locks:
        with locks.lock("name"):
            pass
        node = locks._door.store.fleet.nodes[0]  # type: ignore[attr-defined]
        stopped.pause()
        _hold_until(locks, lambda: node.down)
        stopped.resume()
        _hold_until(locks, lambda: not node.down)
        with locks.lock("name"):
            wait_until("the vote", lambda: stopped.ask("HEXISTS", KEY, "x") == 1)


def test_a_node_comes_back_although_its_reviver_was_interrupted(
    nodes: Ensemble[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the start of the thread that tries it: somebody else tries it later."""
    stopped = nodes.nodes[0]
    with holdfast.connect(_url(nodes), ttl=10) as locks:
        with locks.lock("name"):
            pass
        node = locks._door.store.fleet.nodes[0]  # type: ignore[attr-defined]
        start = threading.Thread.start

        def torn(thread: threading.Thread) -> None:
            if thread.name == "holdfast-redlock-revive":
                raise KeyboardInterrupt
            start(thread)

        stopped.pause()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", torn)
            with pytest.raises(KeyboardInterrupt):
                _hold_until(locks, lambda: False)
        stopped.resume()
        _hold_until(locks, lambda: not node.down)


def _wished_for(node: RedisServer) -> bool:
    return node.ask("HEXISTS", KEY, "i") == 1


def _hold_until(locks: holdfast.Locks, condition: Callable[[], bool]) -> None:
    def held() -> bool:
        with locks.lock("name", timeout=10):
            return condition()

    wait_until("the node", held)


def test_a_renewal_heals_a_wiped_node(nodes: Ensemble[RedisServer]) -> None:
    """A node that forgot a hold gets it back; who was superseded does not."""
    wiped = nodes.nodes[0]
    with holdfast.connect(_url(nodes), ttl=10) as locks, locks.lock("name") as lease:
        wiped.wipe()

        def healed() -> bool:
            lease.extend()
            return wiped.ask("HGET", KEY, "xt") == str(lease.token)

        wait_until("the healing", healed)
        wiped.ask("HDEL", KEY, "x", "xe", "xt", "xl", "xs", "xa")
        wiped.ask("HSET", KEY, "c", str(lease.token + 1))
        lease.extend()
        assert wiped.ask("HEXISTS", KEY, "x") == 0


def test_readers_and_slots_survive_a_wiped_node(nodes: Ensemble[RedisServer]) -> None:
    """What a majority holds is held: no writer gets in, no slot is given twice."""
    with (
        holdfast.connect(_url(nodes), ttl=10) as locks,
        holdfast.connect(_url(nodes)) as others,
        locks.rwlock("name").read(),
        locks.semaphore("slots", 2) as mine,
    ):
        nodes.nodes[0].wipe()
        nodes.nodes[1].kill()
        assert others.rwlock("name").write().acquire(blocking=False) is None
        with others.semaphore("slots", 2, timeout=5) as other:
            assert not set(mine.slots) & set(other.slots)
            assert others.semaphore("slots", 2).acquire(blocking=False) is None


@pytest.mark.parametrize("flavour", list(Flavour))
def test_the_wish_of_a_killed_writer_ends(nodes: Ensemble[RedisServer], flavour: Flavour) -> None:
    """It keeps readers out for a writer's sake, and must not outlive one that is gone."""
    writer = Process(_url(nodes), flavour, ttl=10)
    try:
        with (
            holdfast.connect(_url(nodes), ttl=10) as ours,
            holdfast.connect(_url(nodes), ttl=10) as theirs,
            ours.rwlock("name").read() as first,
        ):
            writer.send("acquire", name="name")
            wait_until("the wish", lambda: all(map(_wished_for, nodes.nodes)))
            assert theirs.rwlock("name").read().acquire(blocking=False) is None
            writer.kill()
            with theirs.rwlock("name", timeout=SOON).read():
                assert first.held
    finally:
        writer.close()


def test_two_wiped_nodes_of_three_let_nobody_in() -> None:
    """The quarantine keeps a majority that forgot from electing a second holder."""
    with Ensemble([RedisServer() for _ in range(3)]) as nodes:
        mark_as_new(_url(nodes))
        with (
            holdfast.connect(_url(nodes), ttl=10) as ours,
            holdfast.connect(_url(nodes), ttl=10) as theirs,
        ):
            lease = ours.lock("name", renew=False).acquire()
            assert lease is not None
            for node in nodes.nodes[:2]:
                node.wipe()
            assert theirs.lock("name").acquire(timeout=1) is None
            assert lease.held
            lease.release()


def test_tokens_grow_under_contention_and_faults(
    nodes: Ensemble[RedisServer], tmp_path: Path
) -> None:
    """Four processes, and one node after the other that goes and comes back."""
    path, enough = tmp_path / "tokens", tmp_path / "enough"
    script = Path(__file__).with_name("redlock_contender.py")
    words = [sys.executable, str(script), _url(nodes), str(path), str(enough)]
    workers = [subprocess.Popen(words) for _ in range(4)]
    try:
        wait_until("the first holds", path.exists)
        nodes.nodes[0].wipe()
        nodes.nodes[1].pause()
        _wait_for_more(path)
        nodes.nodes[1].resume()
        _wait_for_more(path)
        nodes.nodes[2].kill()
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
