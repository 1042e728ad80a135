"""Reading what users give as durations, and refusing what can't be one."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["Duration", "seconds", "timeout_seconds"]

if TYPE_CHECKING:
    from datetime import timedelta

    Duration = float | timedelta
    """Seconds, or a ``timedelta``."""
else:
    Duration = float  # whoever has a timedelta has loaded its module; we need not

LONGEST_SECONDS = 366 * 24 * 3600.0
INFINITE = float("inf")


def seconds(value: Duration, word: str) -> float:
    """A positive, finite number of seconds, at most a year; raises ``ValueError`` otherwise."""
    number = _number(value, word)
    if not 0 < number <= LONGEST_SECONDS:
        raise ValueError(f"{word} is a positive number of seconds, a year at most; not {value!r}")
    return number


def timeout_seconds(value: Duration | None) -> float | None:
    """How long to wait: ``None`` (also -1 and infinity) is for ever, 0 is to try once."""
    if value is None:
        return None
    number = _number(value, "timeout")
    if number == -1 or number == INFINITE:
        return None
    if not number >= 0:
        raise ValueError(f"timeout is None (for ever), 0 (try once) or seconds; not {value!r}")
    return min(number, LONGEST_SECONDS)


def _number(value: Duration, word: str) -> float:
    total = getattr(value, "total_seconds", None)
    if total is not None:
        return float(total())
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{word} is seconds or a timedelta, not {type(value).__name__}")
    return float(value)
