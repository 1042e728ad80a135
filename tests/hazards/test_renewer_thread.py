"""An interrupted start leaves one renewer thread, and it always ends with its client."""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any

import pytest

import holdfast
from holdfast.claim import Busy, Claim, Grant
from holdfast.io.threads import OneThread
from holdfast.testing import loops


def _renewers() -> int:
    return sum(thread.name == "holdfast-renewer" for thread in threading.enumerate())


@pytest.mark.parametrize("started", [True, False], ids=["started", "not-started"])
def test_an_interrupt_in_the_start_of_the_renewer(
    monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    start = threading.Thread.start

    def torn(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        if started:
            start(thread)
        raise KeyboardInterrupt

    others = _renewers()
    with holdfast.connect("memory://", ttl=0.6) as locks:
        monkeypatch.setattr(threading.Thread, "start", torn)
        with pytest.raises(KeyboardInterrupt), locks.lock("name"):
            pass
        with locks.lock("name", timeout=5) as lease:
            time.sleep(1)  # the ttl is over: it was renewed
            assert lease.held
            assert _renewers() == others + 1
    assert _renewers() == others  # and it has ended with its client


def test_a_second_thread_after_an_interrupted_start_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first thread was started, but not yet registered when the start was tried again."""
    go, done = threading.Event(), threading.Event()
    worked: list[str] = []

    def work() -> None:
        worked.append(threading.current_thread().name)
        done.wait(30)

    one = OneThread("one", work)
    start, threads = threading.Thread.start, []

    def torn(thread: threading.Thread) -> None:
        run = thread.run
        thread.run = lambda: (go.wait(30), run())  # type: ignore[assignment]
        threads.append(thread)
        start(thread)
        if len(threads) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", torn)
    with pytest.raises(KeyboardInterrupt):
        one.start()
    one.start()
    one.start()
    go.set()
    for thread in threads:
        thread.join(0.5)
    assert (len(threads), len(worked)) == (2, 1)
    done.set()
    for thread in threads:
        thread.join(30)
    assert len(worked) == 1


def test_threads_that_start_it_at_the_same_time_start_one() -> None:
    others = _renewers()
    with holdfast.connect("memory://") as locks:
        leases = []

        def hold(name: str) -> None:
            leases.append(locks.lock(name).acquire())

        threads = [threading.Thread(target=hold, args=(str(n),)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert _renewers() == others + 1
        for lease in leases:
            assert lease is not None
            assert lease.release()


def test_a_warning_that_is_an_error_is_raised_last() -> None:
    others = _renewers()
    locks = holdfast.connect("memory://")
    lease = locks.lock("name").acquire()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with pytest.raises(ResourceWarning, match="'name' was still held"):
            locks.close()
    assert lease is not None
    assert lease.lost
    assert _renewers() == others


def test_a_warning_that_is_an_error_is_raised_last_async() -> None:
    async def close() -> None:
        locks = holdfast.connect_async("memory://")
        lease = await locks.lock("name").acquire()
        with pytest.raises(ResourceWarning, match="'name' was still held"):
            await locks.close()
        assert lease is not None
        assert lease.lost

    others = _renewers()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        loops.run(close())
    assert _renewers() == others


def test_a_grant_to_a_closed_client_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request was under way when the client was closed and its renewer ended."""
    with holdfast.connect("memory://", ttl=3600) as theirs:
        ours = holdfast.connect("memory://", ttl=3600)
        backend = ours._engine.backend
        attempt, asked = backend.attempt, threading.Event()

        async def late(claim: Claim, **how: Any) -> Grant | Busy:
            asked.set()
            while not ours._renewer_thread.renewer.closing or _renewers() > others:
                time.sleep(0.01)
            return await attempt(claim, **how)

        monkeypatch.setattr(backend, "attempt", late)
        others = _renewers()

        def acquire() -> None:
            with pytest.raises(holdfast.HoldfastError, match="closed"):
                ours.lock("late").acquire()

        thread = threading.Thread(target=acquire)
        thread.start()
        assert asked.wait(30)
        ours.close()
        thread.join(30)
        with theirs.lock("late", timeout=30):
            pass
