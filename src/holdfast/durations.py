"""Durations: those that users give, checked and converted to seconds; and how texts show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["Duration", "counted", "seconds", "shown", "timeout_seconds"]

if TYPE_CHECKING:
    from datetime import timedelta

    Duration = float | timedelta
    """Seconds, or a ``timedelta``."""
else:
    Duration = float  # datetime is not imported here: a caller with a timedelta has done so

LONGEST_SECONDS = 366 * 24 * 3600.0
INFINITE = float("inf")


def seconds(value: Duration, word: str, *, zero: bool = False) -> float:
    """A positive, finite number of seconds, at most 366 days, or 0 where that is allowed; raises
    ``ValueError`` otherwise."""
    number = _number(value, word)
    if not 0 < number <= LONGEST_SECONDS and not (zero and number == 0):
        longest = f"{LONGEST_SECONDS:.0f} (366 days) at most"
        raise ValueError(f"{word} is a positive number of seconds, {longest}; not {value!r}")
    return number


def timeout_seconds(value: Duration | None) -> float | None:
    """A timeout in seconds: ``None`` (also for -1 and infinity) is for ever, 0 is one try."""
    if value is None:
        return None
    number = _number(value, "timeout")
    if number == -1 or number == INFINITE:
        return None
    if not number >= 0:
        raise ValueError(f"timeout is None (for ever), 0 (try once) or seconds; not {value!r}")
    return min(number, LONGEST_SECONDS)


def shown(value: float) -> str:
    """A duration for people: one decimal, or the first digit of less than a tenth of a second.

    >>> shown(2.4999), shown(30.0), shown(0.05), shown(0.0)
    ('2.5 s', '30 s', '0.05 s', '0 s')
    """
    text = f"{max(value, 0.0):.1f}".removesuffix(".0")
    return f"{value:.1g} s" if text == "0" and value >= 0.001 else f"{text} s"


def counted(number: int, one: str, many: str = "") -> str:
    """A number and its noun, in the singular or the plural.

    >>> counted(1, "try", "tries"), counted(2, "waiter")
    ('1 try', '2 waiters')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _number(value: Duration, word: str) -> float:
    total = getattr(value, "total_seconds", None)
    if total is not None:
        return float(total())
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{word} is seconds or a timedelta, not {type(value).__name__}")
    return float(value)
