"""The clocks. Certain time runs on boot time where there is one: it goes on during suspend."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

__all__ = ["now", "wall"]

now: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)
wall: Callable[[], float] = time.time
