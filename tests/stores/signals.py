"""Sends signals to a test all the time, as a profiler does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["signals"]

EVERY_SECONDS = 0.1


@contextmanager
def signals() -> Iterator[None]:
    """Interrupt the system calls of this thread every ``EVERY_SECONDS``; they are resumed."""
    over, me = threading.Event(), threading.get_ident()

    def send() -> None:
        while not over.wait(EVERY_SECONDS):
            signal.pthread_kill(me, signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGUSR2, before)
