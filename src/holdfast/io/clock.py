"""Clocks, randomness, host and process. Certain time uses the boot-time clock if the system has
one: that clock runs during suspend."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

__all__ = ["between", "now", "wall", "where"]

now: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)
wall: Callable[[], float] = time.time


def between(low: float, high: float, /) -> float:
    """A random number, for jitter. From the system, so that forks of a process draw different
    numbers."""
    return low + (high - low) * int.from_bytes(os.urandom(4)) / 2**32


def where() -> tuple[str, int]:
    """The host name and the process id."""
    if hasattr(os, "uname"):
        return os.uname().nodename, os.getpid()
    import socket

    return socket.gethostname(), os.getpid()
