"""Clocks and place. Certain time runs on boot time where there is one: it goes on in suspend."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial

__all__ = ["now", "wall", "where"]

now: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)
wall: Callable[[], float] = time.time


def where() -> tuple[str, int]:
    """This host and process."""
    return socket.gethostname(), os.getpid()
