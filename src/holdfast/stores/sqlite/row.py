"""Checks of the values that are read from the embedded store's file. Pure.

Every user of a shared file can write anything into it, and SQLite keeps any value in any column. A
value that no version of Holdfast writes is ``Unreadable``; a request raises ``Incompatible`` for
it, with the name of the lock. Labels are read by ``claim.read_label``.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from holdfast.claim import Mode
from holdfast.errors import Incompatible

__all__ = [
    "LAST_ORDER",
    "MODES",
    "Unreadable",
    "count",
    "damaged",
    "last_token",
    "mode",
    "moment",
    "order",
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
LAST_ORDER = 2**62
LAST_MOMENT = 250_000_000_000.0  # of the wall clock, in the year 9892; no other clock runs so long


class Unreadable(ValueError):
    """A value that no version of Holdfast writes."""

    def __init__(self, what: str, value: object) -> None:
        shown = repr(value[:40] if isinstance(value, str | bytes) else value)
        super().__init__(f"its {what} is {shown}")


def damaged(name: str, store: str, error: Unreadable) -> Incompatible:
    """The error of a request for the name."""
    return Incompatible(
        f"what is stored for {name!r} on {store} can't be read ({error}): something other than "
        "this version has written to the file. Move it away while no program uses it; tokens "
        "continue from the clock"
    )


def _whole(value: Any, most: int, what: str) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise Unreadable(what, value)
    return value


def token(value: Any) -> int:
    """A token, or 0 where there is none."""
    return _whole(value, LARGEST_TOKEN, "token")


def last_token(value: Any) -> int:
    """A token that later tokens follow: far below the largest, which no clock ever gets near."""
    return _whole(value, LARGEST_TOKEN - TOKENS_LEFT, "last token")


def count(value: Any, what: str) -> int:
    """A number of things."""
    return _whole(value, LARGEST_COUNT, what)


def order(value: Any) -> int:
    """The order of arrival of a claim. It grows while the name has other claims. The column is
    called ``place``."""
    return _whole(value, LAST_ORDER, "place")


def moment(value: Any, what: str) -> float:
    """Seconds on one of the clocks."""
    if type(value) not in (int, float) or not isfinite(value) or not 0 <= value <= LAST_MOMENT:
        raise Unreadable(what, value)
    return float(value)


def text(value: Any, what: str) -> str:
    """Any text. Text that is not in UTF-8 equals no text of Holdfast."""
    if not isinstance(value, str):
        raise Unreadable(what, value)
    return value


def whole_text(value: Any, what: str) -> str:
    """A text that was read as bytes, because it must be exactly what was written."""
    try:
        if isinstance(value, bytes):
            return value.decode()
    except UnicodeDecodeError:
        pass
    raise Unreadable(what, value)


def mode(value: Any) -> Mode:
    """The mode of a claim."""
    found = MODES.get(value) if isinstance(value, str) else None
    if found is None:
        raise Unreadable("mode", value)
    return found


def slots(value: Any) -> tuple[int, ...]:
    """Slot numbers, which are stored with commas between them."""
    if value == "":
        return ()
    parts = value.split(",", LARGEST_LIMIT) if isinstance(value, str) else []
    if not parts or not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        raise Unreadable("slots", value)
    numbers = tuple(map(int, parts))
    if len(numbers) > LARGEST_LIMIT or max(numbers) >= LARGEST_LIMIT:
        raise Unreadable("slots", value)
    return numbers
