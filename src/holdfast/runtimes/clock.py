"""Clocks and place. Certain time runs on boot time where there is one: it goes on in suspend."""

from __future__ import annotations

import os
import time
from _random import Random
from collections.abc import Callable
from functools import partial

__all__ = ["between", "now", "wall", "where"]

now: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)
wall: Callable[[], float] = time.time

# The generator alone: the module around it takes longer to load than a lock to take.
_draw = Random().random


def between(low: float, high: float, /) -> float:
    """A random number, for jitter."""
    return low + (high - low) * _draw()


def where() -> tuple[str, int]:
    """This host and process."""
    if hasattr(os, "uname"):
        return os.uname().nodename, os.getpid()
    import socket

    return socket.gethostname(), os.getpid()
