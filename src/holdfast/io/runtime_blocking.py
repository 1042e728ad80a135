"""The blocking runtime: threads, and nothing that ever suspends."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Coroutine, Hashable
from contextlib import suppress
from typing import Any, TypeVar

from holdfast.core.contract import Signal
from holdfast.core.drive import run_now
from holdfast.io import clock

__all__ = ["BlockingRuntime"]

T = TypeVar("T")

# Longer waits are cut into slices: CPython's timed waits overflow on huge timeouts.
LONGEST_WAIT_SECONDS = 3600.0


class BlockingSignal:
    """An event on a ``SimpleQueue``: cheap to make, and its ``put`` may be called from a
    destructor that interrupts another ``put``, which ``threading.Event.set`` does not allow."""

    __slots__ = ("_queue", "_set")

    def __init__(self) -> None:
        # Looked up at each call: gevent replaces it, and a queue of C would block all greenlets.
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._set = False

    def set(self) -> None:
        self._set = True
        self._queue.put(None)

    def is_set(self) -> bool:
        return self._set

    def clear(self) -> None:
        self._set = False  # first: a set() in between is kept
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()

    def wait(self, seconds: float) -> bool:
        """Waits for at most ``seconds``; returns whether it was set."""
        if not self._set:
            with suppress(queue.Empty):
                self._queue.get(timeout=max(0.0, seconds))
        return self._set


class ForeignThread:
    """The identity of a thread that ``threading`` did not start, from its first use here to its
    end.

    ``threading`` identifies such a thread by its number only. Before Python 3.13 the next thread
    with the same number gets the same object, and would be mistaken for the first thread."""

    __slots__ = ("__weakref__", "name")

    def __init__(self, name: str) -> None:
        self.name = name

    def is_alive(self) -> bool:
        """True: a weak reference to this object dies with the thread."""
        return True


class _Here(threading.local):
    """The identity of the calling thread. The object ends with the thread."""

    def __init__(self) -> None:  # once in every thread
        thread = threading.current_thread()
        foreign = isinstance(thread, threading._DummyThread)
        self.me = ForeignThread(thread.name) if foreign else thread


_here = _Here()


def _me() -> threading.Thread | ForeignThread:
    return _here.me


class BlockingRuntime:
    """The runtime of all threads of a process."""

    blocking = True
    now = staticmethod(clock.now)
    wall = staticmethod(clock.wall)
    me = staticmethod(_me)
    between = staticmethod(clock.between)
    mutex = staticmethod(threading.Lock)

    where = staticmethod(clock.where)

    def name_of(self, caller: Hashable) -> str:
        return getattr(caller, "name", "?")

    def alive(self, caller: Hashable) -> bool:
        # By its method: under gevent the main thread is no instance of ``threading.Thread``.
        is_alive = getattr(caller, "is_alive", None)
        return is_alive is not None and bool(is_alive())

    def signal(self) -> Signal:
        return BlockingSignal()

    async def wait(self, signal: Signal, until: float | None) -> bool:
        assert isinstance(signal, BlockingSignal)
        while True:
            left = LONGEST_WAIT_SECONDS if until is None else until - self.now()
            if signal.wait(min(left, LONGEST_WAIT_SECONDS)):
                return True
            if until is not None and self.now() >= until:
                return False

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def finish(self, work: Coroutine[Any, Any, object], seconds: float) -> None:
        await work

    async def within(self, work: Coroutine[Any, Any, T], seconds: float) -> T | None:
        results: list[T] = []

        def run() -> None:
            with suppress(Exception):
                results.append(run_now(work))

        thread = threading.Thread(target=run, name="holdfast-look", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads
            work.close()
            return None
        thread.join(seconds)
        return results[0] if results else None
