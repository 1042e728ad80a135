"""What is read from the embedded store's file, checked before anything relies on it.

Everybody who may write a shared file can write anything into it, and SQLite keeps any value in any
column. What no version of ours writes is ``Unreadable``; requests tell so as ``Incompatible``,
with the name of the lock. Labels are read by ``claim.read_label``.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from holdfast.claim import Mode
from holdfast.errors import Incompatible

__all__ = [
    "LAST_PLACE",
    "MODES",
    "Unreadable",
    "count",
    "damaged",
    "last_token",
    "mode",
    "moment",
    "place",
    "slots",
    "text",
    "token",
    "whole_text",
]

MODES: dict[str, Mode] = {mode.value: mode for mode in Mode}
LARGEST_TOKEN = 2**63 - 1
TOKENS_LEFT = 2**40
LARGEST_LIMIT = 65_536
LARGEST_COUNT = 2**31 - 1
LAST_PLACE = 2**62
LAST_MOMENT = 250_000_000_000.0  # of the wall clock, in the year 9892; no other clock runs so long


class Unreadable(ValueError):
    """A value that no version of ours has written."""

    def __init__(self, what: str, value: object) -> None:
        told = repr(value[:40] if isinstance(value, str | bytes) else value)
        super().__init__(f"its {what} is {told}")


def damaged(name: str, store: str, error: Unreadable) -> Incompatible:
    """What a request for the name raises."""
    return Incompatible(
        f"what is stored for {name!r} on {store} can't be read ({error}): something other than "
        "this version has written to the file. Move it away while nobody uses it; tokens go on "
        "from the clock"
    )


def _whole(value: Any, most: int, what: str) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise Unreadable(what, value)
    return value


def token(value: Any) -> int:
    """A token, or 0 where there is none."""
    return _whole(value, LARGEST_TOKEN, "token")


def last_token(value: Any) -> int:
    """A token that others are to follow. No clock ever gets near the largest."""
    return _whole(value, LARGEST_TOKEN - TOKENS_LEFT, "last token")


def count(value: Any, what: str) -> int:
    """How many of something."""
    return _whole(value, LARGEST_COUNT, what)


def place(value: Any) -> int:
    """A place in the line: it grows as long as somebody is there."""
    return _whole(value, LAST_PLACE, "place")


def moment(value: Any, what: str) -> float:
    """Seconds on one of the clocks."""
    if type(value) not in (int, float) or not isfinite(value) or not 0 <= value <= LAST_MOMENT:
        raise Unreadable(what, value)
    return float(value)


def text(value: Any, what: str) -> str:
    """Any text. One that is not in UTF-8 equals none of ours."""
    if not isinstance(value, str):
        raise Unreadable(what, value)
    return value


def whole_text(value: Any, what: str) -> str:
    """A text that was read as bytes, for one that must come back as it was written."""
    try:
        if isinstance(value, bytes):
            return value.decode()
    except UnicodeDecodeError:
        pass
    raise Unreadable(what, value)


def mode(value: Any) -> Mode:
    """How a name is claimed."""
    found = MODES.get(value) if isinstance(value, str) else None
    if found is None:
        raise Unreadable("mode", value)
    return found


def slots(value: Any) -> tuple[int, ...]:
    """Slots as they are stored: numbers with commas."""
    if value == "":
        return ()
    parts = value.split(",", LARGEST_LIMIT) if isinstance(value, str) else []
    if not parts or not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        raise Unreadable("slots", value)
    numbers = tuple(map(int, parts))
    if len(numbers) > LARGEST_LIMIT or max(numbers) >= LARGEST_LIMIT:
        raise Unreadable("slots", value)
    return numbers
