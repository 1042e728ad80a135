"""Nothing that is measured may run for ever, whatever it waits in."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Alarm", "limited"]


class Alarm(BaseException):
    """It took too long. No ``Exception``: what is measured may swallow those."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises ``Alarm`` in the main thread when the time is over; elsewhere it does nothing."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(
        signal, "setitimer"
    ):
        yield
        return

    def expire(*_: Any) -> None:
        raise Alarm(f"no answer in {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
