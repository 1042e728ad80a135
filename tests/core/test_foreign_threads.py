"""Threads that ``threading`` did not start have identities of their own, although their numbers are
reused."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable

import pytest

import holdfast
from holdfast.io.clock import now
from holdfast.lease import Lease

SOON = 10.0
TRIES = 50


def _run(work: Callable[[], object]) -> int:
    """Runs the work in a foreign thread; returns the number of the thread."""
    over = threading.Event()

    def run() -> None:
        try:
            work()
        finally:
            over.set()

    number = _thread.start_new_thread(run, ())
    assert over.wait(SOON)
    return number


def _wait_for(condition: Callable[[], object]) -> None:
    ends = now() + SOON
    while not condition():
        assert now() < ends
        time.sleep(0.001)


def test_the_next_foreign_thread_does_not_re_enter() -> None:
    with holdfast.connect("memory://foreign threads") as locks:
        lock = locks.lock("name", reentrant=True)
        taken: list[Lease | None] = []
        first = _run(lambda: taken.append(lock.acquire(timeout=SOON)))
        for _ in range(TRIES):
            if _run(lambda: taken.append(lock.acquire(blocking=False))) == first:
                break
        else:
            pytest.fail("no number was recycled")
        assert taken[0] is not None
        assert taken[0].held
        assert taken[1:] == [None] * len(taken[1:])
        assert taken[0].release()


def test_a_foreign_thread_re_enters_its_own() -> None:
    with holdfast.connect("memory://foreign re-entry") as locks:
        lock = locks.lock("name", reentrant=True)
        held: list[bool] = []

        def work() -> None:
            with lock as outer, lock as inner:
                held.append(inner.token == outer.token)
            assert lock.acquire(timeout=0)
            lock.release()

        _run(work)
        assert held == [True]
        assert not locks.lock("name").locked()


def test_a_block_ends_with_its_foreign_thread() -> None:
    with holdfast.connect("memory://foreign block") as locks:
        block = locks.lock("name")
        leases: list[Lease] = []
        _run(lambda: leases.append(block.__enter__()))
        locks._engine.renewer.plan(0.0)
        _wait_for(lambda: not locks.lock("name").locked())
        assert not leases[0].held


def test_a_foreign_thread_has_a_name() -> None:
    with holdfast.connect("memory://foreign name") as locks:
        names: list[str] = []

        def work() -> None:
            with locks.lock("name"):
                names.append(locks.inspect("name").holders[0].thread)

        _run(work)
        assert len(names) == 1
        assert names[0].startswith("Dummy-")
