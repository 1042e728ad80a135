"""How a thread waits for the last reply of a pipeline, or for an event. Tasks: see ``aio``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

__all__ = ["LONGEST_WAIT_SECONDS", "BlockingCompletion", "Completion"]

LONGEST_WAIT_SECONDS = 3600.0


class Completion(Protocol):
    """A thread or task that waits for the last reply of a pipeline."""

    def done(self) -> None:
        """Ends the wait, from any thread."""
        ...


class BlockingCompletion:
    """A thread that waits for a reply or for an event. Used once."""

    __slots__ = ("_lock", "answered", "interrupt", "poked")

    def __init__(self) -> None:
        self._lock: threading.Lock | None = None
        self.answered = False
        self.poked = False
        """Whether the thread has to look who reads the connection."""
        self.interrupt: Callable[[], None] | None = None
        """Interrupts the thread's poll of the socket; set while it may poll."""

    def done(self) -> None:
        self.answered = True
        interrupt = self.interrupt
        if interrupt is not None:
            interrupt()
        self._release()

    set = done

    def is_set(self) -> bool:
        return self.answered

    def poke(self) -> None:
        """Makes the thread look who reads the connection: the thread that read has gone."""
        self.poked = True
        self._release()

    def _release(self) -> None:
        lock = self._lock
        if lock is not None:
            with suppress(RuntimeError):  # released already
                lock.release()

    def sleep(self, seconds: float) -> None:
        """Waits while another thread reads, until ``done`` or ``poke``."""
        lock = threading.Lock()
        lock.acquire()
        self._lock = lock  # before the check: from here on it is released
        if not self.answered and not self.poked:
            lock.acquire(timeout=max(0.0, min(seconds, LONGEST_WAIT_SECONDS)))
        self.poked = False
