"""The threads that all clients of a process share: the watcher, and the callback thread."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest

import holdfast
from hazards.tearing import handled_at, lines_of, torn_at
from holdfast.core.breaking import why_lost
from holdfast.core.hold import Hold
from holdfast.core.renewer import Renewer
from holdfast.core.watcher import PlannedLoop
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.io.threads import watcher
from holdfast.testing import loops
from servers.process import wait_until

SOON = 30.0


def _threads() -> Counter[str]:
    return Counter(thread.name for thread in threading.enumerate())


def _run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_all_clients_share_one_watcher_and_one_thread_for_callbacks() -> None:
    reasons: list[str] = []
    leases = []
    clients = [holdfast.connect(f"memory://shared-{n}", ttl=0.3) for n in range(10)]
    for client in clients:
        for number in range(10):
            lease = client.lock(f"{number}", renew=False).acquire()
            assert lease is not None
            lease.on_lost(reasons.append)
            leases.append(lease)
    wait_until("all losses", lambda: len(reasons) == 100)
    threads = _threads()
    assert (threads["holdfast-watcher"], threads["holdfast-callbacks"]) == (1, 1)
    for client in clients:
        client.close()
    assert not watcher.renewers


def test_a_slow_callback_delays_callbacks_only() -> None:
    """Neither the end of another hold, nor the cancellation of a task's block."""
    entered, let_go = threading.Event(), threading.Event()
    called: list[str] = []

    def slow(reason: str) -> None:
        entered.set()
        assert let_go.wait(SOON)
        called.append(threading.current_thread().name)

    async def block() -> float:
        ends = 0.0
        async with holdfast.connect_async("memory://tasks") as locks:
            with pytest.raises(holdfast.LockLost):  # noqa: PT012
                async with locks.lock("name", ttl=1.5, renew=False) as lease:
                    ends = now() + lease.remaining
                    await asyncio.sleep(SOON)
        return now() - ends

    with holdfast.connect("memory://slow", ttl=0.3) as locks:
        first, second = (locks.lock(name, renew=False).acquire() for name in ("first", "second"))
        assert first is not None
        assert second is not None
        first.on_lost(slow)
        assert entered.wait(SOON)
        second.on_lost(lambda reason: called.append("second"))
        wait_until("the loss", lambda: second._hold.state.value == "lost")
        assert loops.run(block()) < 1.0
        assert called == []
        let_go.set()
        wait_until("both callbacks", lambda: called == ["holdfast-callbacks", "second"])


@pytest.mark.parametrize("error", [ValueError("a mistake"), SystemExit("an end")], ids=repr)
def test_a_callback_that_fails_is_logged_and_the_next_is_called(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    reasons: list[str] = []

    def fail(reason: str) -> None:
        raise error

    with holdfast.connect("memory://failing", ttl=0.3) as locks:
        lease = locks.lock("name", renew=False).acquire()
        assert lease is not None
        with caplog.at_level(logging.ERROR, "holdfast"):
            lease.on_lost(fail)
            lease.on_lost(reasons.append)
            wait_until("the second callback", lambda: bool(reasons))
    assert str(error) in caplog.text


def test_a_suspend_is_noticed_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of certain time jumps while all threads sleep on another one."""
    reasons: list[float] = []
    with holdfast.connect("memory://suspended", ttl=3600) as locks:
        lease = locks.lock("name").acquire()
        assert lease is not None
        lease.on_lost(lambda reason: reasons.append(now()))
        wait_until("the watcher's sleep", lambda: watcher.planned < float("inf"))
        resumed = now()
        monkeypatch.setattr(BlockingRuntime, "now", staticmethod(lambda: now() + 4000))
        wait_until("the loss", lambda: bool(reasons))
        assert reasons[0] - resumed < 2.0  # the promise is one second


def test_after_a_jump_of_the_wall_clock_a_loss_is_known_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a snapshot of a virtual machine: by the next renewal it would be 1,200 s."""
    url = "memory://stopped"
    reasons: list[str] = []
    with holdfast.connect(url, ttl=3600) as locks, holdfast.connect(url) as others:
        lease, kept = locks.lock("name").acquire(), locks.lock("kept").acquire()
        assert lease is not None
        assert kept is not None
        lease.on_lost(reasons.append)
        wait_until("the watcher's sleep", lambda: watcher.planned < float("inf"))
        assert others.break_lock("name", reason="a test")
        wall = BlockingRuntime.wall
        monkeypatch.setattr(BlockingRuntime, "wall", staticmethod(lambda: wall() + 57.0))
        wait_until("the loss", lambda: bool(reasons))
        assert kept.held
        assert kept.release() is True


NO_THREAD = """
import logging, sys, threading, time, holdfast
logging.disable()
start = threading.Thread.start

def refuse(thread):
    if thread.name == sys.argv[1]:
        raise RuntimeError("can't start new thread")
    start(thread)

threading.Thread.start = refuse
locks = holdfast.connect("memory://", ttl=3600, timeout=20)
reasons = []
try:
    with locks.lock("name") as lease:
        lease.on_lost(reasons.append)
except RuntimeError as error:
    print(error)
threading.Thread.start = start
lease = locks.lock("name", ttl=0.3, renew=False).acquire()
lease.on_lost(reasons.append)
while not reasons:
    time.sleep(0.01)
print(len(reasons))
"""


@pytest.mark.parametrize("part", ["holdfast-watcher", "holdfast-callbacks"])
def test_without_a_thread_the_acquire_fails_and_holds_nothing(part: str) -> None:
    """A hold that can't be watched is not taken; a callback that can't be called is refused."""
    assert _run(NO_THREAD, part).split("\n") == ["can't start new thread", "1"]


FORK = """
import logging, os, threading, time, holdfast
logging.disable()

def lose(locks):
    lease = locks.lock("name", ttl=0.3, renew=False).acquire()
    reasons = []
    lease.on_lost(reasons.append)
    while not reasons:
        time.sleep(0.01)
    names = [thread.name for thread in threading.enumerate()]
    return names.count("holdfast-watcher"), names.count("holdfast-callbacks"), len(reasons)

locks = holdfast.connect("memory://")
kept = locks.lock("kept").acquire()
print(*lose(locks), flush=True)
pid = os.fork()
if pid == 0:
    assert kept.lost
    print(*lose(locks), flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert kept.release()
print(*lose(locks))
"""


def test_a_fork_has_threads_of_its_own() -> None:
    assert _run(FORK).split("\n") == ["1 1 1"] * 3


def test_the_exit_of_a_program_with_a_hold_prints_nothing() -> None:
    program = """
import holdfast
locks = holdfast.connect("memory://")
lease = locks.lock("name").acquire()
lease.on_lost(print)
"""
    assert _run(program) in {"", "its client was closed"}


@pytest.mark.parametrize(("name", "line"), [*lines_of(Renewer.add), *lines_of(PlannedLoop.plan)])
def test_an_interrupt_anywhere_in_the_registration_of_a_hold(name: str, line: int) -> None:
    """It holds nothing afterwards, and the next hold is watched."""
    code = {"add": Renewer.add, "plan": PlannedLoop.plan}[name].__code__
    reasons: list[str] = []
    with holdfast.connect(f"memory://torn-{name}-{line}", ttl=0.4) as locks:

        def use() -> None:
            with locks.lock("name"):
                pass

        torn_at(code, line, use)
        lease = locks.lock("name", renew=False, timeout=SOON).acquire()
        assert lease is not None
        lease.on_lost(reasons.append)
        wait_until("the loss", lambda: bool(reasons))
        assert len(reasons) == 1


@pytest.mark.parametrize("line", [line for _, line in lines_of(Hold.mark_lost)])
def test_a_callback_registered_during_a_loss_is_called_once_with_the_reason(line: int) -> None:
    reasons: list[str] = []
    with holdfast.connect(f"memory://asked-{line}") as locks:
        lease = locks.lock("name").acquire()
        assert lease is not None
        renewer, hold, code = locks._engine.renewer, lease._hold, Hold.mark_lost.__code__
        lease.on_lost(reasons.append)
        lose = partial(renewer.lose, hold, "it was broken")
        handled_at(code, line, lose, lambda: lease.on_lost(reasons.append))
        wait_until("both", lambda: len(reasons) >= 2)
    assert reasons == ["it was broken"] * 2


LOSING = (
    why_lost,
    Renewer.lose,
    Renewer.declare_lost,
    Hold.mark_lost,
    Hold.mark_doubtful,
    Hold.call_lost_callbacks,
)


@pytest.mark.parametrize(
    ("part", "line"), [(part, line) for part in LOSING for _, line in lines_of(part)]
)
def test_an_interrupt_anywhere_in_an_extend_that_learns_of_a_loss(part: Any, line: int) -> None:
    """Each callback is still called, once."""
    reasons: list[str] = []
    url = f"memory://torn-{part.__qualname__}-{line}"
    with holdfast.connect(url, ttl=60) as locks, holdfast.connect(url) as other:
        lease = locks.lock("name").acquire()
        assert lease is not None
        lease.on_lost(reasons.append)
        other.break_lock("name", reason="a test")

        def extend() -> None:
            with pytest.raises(holdfast.LockLost):
                lease.extend()

        torn_at(part.__code__, line, extend)
        wait_until("the loss", lambda: bool(reasons))
        assert lease.lost
        lease.on_lost(reasons.append)
        wait_until("the last", lambda: len(reasons) > 1)
    assert reasons[0] == reasons[1]
    plain = "it ran out or was broken, and is no longer stored"
    # The reason of the client that broke it, unless the interrupt came while it was being read.
    assert reasons[0].endswith(": a test") or (part is why_lost and reasons[0] == plain)
