"""At DEBUG the log tells what an acquire does; otherwise it costs and says nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.claim import Busy, Claim, Grant, LockInfo
from holdfast.core import log


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "holdfast")
    return caplog


@pytest.fixture
def locks() -> Iterator[holdfast.Locks]:
    with holdfast.connect("memory://debug-log") as client:
        yield client


def told(lines: pytest.LogCaptureFixture, logger: str = "holdfast.lock") -> list[str]:
    return [record.getMessage() for record in lines.records if record.name == logger]


def first_words(lines: pytest.LogCaptureFixture) -> list[str]:
    return [line.split()[0].rstrip(":") for line in told(lines)]


def test_a_grant_and_its_release(locks: holdfast.Locks, lines: pytest.LogCaptureFixture) -> None:
    with locks.lock("order:42") as lease:
        pass
    granted, released = told(lines)
    assert granted.startswith("granted 'order:42' (exclusive) on memory://debug-log: token ")
    assert f"token {lease.token}" in granted
    assert released.startswith("released 'order:42' on memory://debug-log: token ")
    assert released.endswith("still ours: yes")


def acquire_and_release(locks: holdfast.Locks) -> None:
    with locks.lock("a", timeout=60):
        pass


def test_a_wait(locks: holdfast.Locks, lines: pytest.LogCaptureFixture) -> None:
    """Of another client: the place in the queue, the wake-up, and the grant."""
    with holdfast.connect("memory://debug-log") as other:
        held = other.lock("a").acquire()
        assert held is not None
        waiter = threading.Thread(target=acquire_and_release, args=(locks,))
        waiter.start()
        while not any("busy: 'a'" in line for line in told(lines)):
            assert waiter.is_alive()
            time.sleep(0.01)
        held.release()
        waiter.join()
    words = first_words(lines)
    assert words[:2] == ["granted", "busy"]
    assert words.index("woken") > words.index("busy")
    assert words.count("granted") == 2
    (busy, *_) = (line for line in told(lines) if line.startswith("busy"))
    assert busy.startswith("busy: 'a' on memory://debug-log, 0 in front; ")


def test_a_wait_behind_the_own_client(lines: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with holdfast.connect_async("memory://debug-log-own") as locks:
            held = await locks.lock("a").acquire()
            assert held is not None
            tasks = [asyncio.ensure_future(locks.lock("a", timeout=60).acquire()) for _ in "12"]
            await asyncio.sleep(0)  # both have queued: the first in the store, the second here
            await held.release()
            for task in tasks:
                lease = await task
                assert lease is not None
                await lease.release()
        assert any("behind other waiters of this client" in line for line in told(lines))

    asyncio.run(main())


def test_a_timeout(locks: holdfast.Locks, lines: pytest.LogCaptureFixture) -> None:
    """Also of an ``acquire`` that answers ``None``."""
    with locks.lock("a"):
        taken = []
        thread = threading.Thread(target=lambda: taken.append(locks.lock("a").acquire(timeout=0)))
        thread.start()
        thread.join()
    assert taken == [None]
    assert "timed out: 'a' on memory://debug-log" in told(lines)


def test_a_store_that_cannot_be_reached(lines: pytest.LogCaptureFixture) -> None:
    with (
        holdfast.connect("redis://127.0.0.1:1/0") as locks,
        pytest.raises(holdfast.BackendUnavailable),
    ):
        locks.lock("a", timeout=1).acquire()
    steps = [line for line in told(lines, "holdfast.store") if line.startswith("unreachable")]
    first, second, *_ = steps
    assert first.startswith("unreachable: attempt 1 for 'a'; the next one in 0 s: redis at ")
    assert re.match(r"unreachable: attempt 2 for 'a'; the next one in \d", second)


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_long_wait_is_told_at_info_and_costs_nothing_otherwise(
    locks: holdfast.Locks,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    level: int,
) -> None:
    """Naming the holder is a request, and there may be many waiters."""
    caplog.set_level(level, "holdfast")
    monkeypatch.setattr("holdfast.core.acquire.LONG_WAIT_SECONDS", 0.0)
    attempts, looks = count_calls(locks, monkeypatch)
    with holdfast.connect("memory://debug-log") as other, other.lock("a", note="its note"):
        waiter = threading.Thread(target=lambda: locks.lock("a").acquire(timeout=4))
        waiter.start()
        while len(attempts) < 3:  # the second of them knows that it has waited
            for waiting in locks._engine.local_queues.all():
                locks._engine.nudge(waiting.claim)
            assert waiter.is_alive()
            time.sleep(0.05)
        looked = len(looks)
        waiter.join()
    (*lines,) = (line for line in told(caplog, "holdfast.lock") if line.startswith("waiting for"))
    assert looked == len(lines) == (level == logging.INFO)
    for line in lines:
        assert re.match(r"waiting for 'a' on memory://debug-log for .* s: held by .*its note", line)


def count_calls(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[object], list[object]]:
    """Records the attempts of a client, and its looks at holders."""
    backend, attempts, looks = locks._engine.backend, list[object](), list[object]()
    attempt, look = backend.attempt, backend.look

    async def attempted(claim: Claim, *, join: bool, until: float | None = None) -> Grant | Busy:
        attempts.append(claim)
        return await attempt(claim, join=join, until=until)

    async def looked(name: str) -> LockInfo:
        looks.append(name)
        return await look(name)

    monkeypatch.setattr(backend, "attempt", attempted)
    monkeypatch.setattr(backend, "look", looked)
    return attempts, looks


def test_nothing_is_said_unless_it_is_asked_for(
    locks: holdfast.Locks, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    with locks.lock("a"):
        assert log.tracer("lock") is None
    assert told(caplog) == []


def test_one_part_alone(locks: holdfast.Locks, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "holdfast.store")
    with locks.lock("a"):
        pass
    assert told(caplog) == []


def test_logging_is_not_imported_for_it() -> None:
    """A command that holds a lock for a moment never imports it."""
    code = (
        "import sys; from holdfast.core import log; "
        "print(log.tracer('lock'), 'logging' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False"]


def test_a_tracer_waits_while_another_thread_imports_logging(tmp_path: Path) -> None:
    """A module that is being imported is in ``sys.modules`` already, without its functions."""
    slow = """
import threading, time
importing.set()
time.sleep(1)
class Quiet:
    def isEnabledFor(self, level): return False
def getLogger(name): return Quiet()
"""
    (tmp_path / "logging.py").write_text(slow)
    program = """
import builtins, sys, threading
builtins.importing = threading.Event()
from holdfast.core import log
assert "logging" not in sys.modules
threading.Thread(target=lambda: __import__("logging")).start()
importing.wait()
assert log.tracer("lock") is None
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
