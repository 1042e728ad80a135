"""Text for a terminal: hostile characters made harmless, times for people."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time

from holdfast.claim import escaped as neutral

__all__ = [
    "ago",
    "clock",
    "columns",
    "duration",
    "is_terminal",
    "lines_said",
    "neutral",
    "say",
    "since",
    "terminal_columns",
    "wrap",
]


_said = 0


def lines_said() -> int:
    """How many lines this process has written to standard error."""
    return _said


def say(message: str) -> None:
    """One line on standard error: a message, a warning or an error."""
    global _said
    _said += 1
    text = " ".join(part.strip() for part in message.splitlines())  # libpq indents by tabs
    line = f"holdfast: {neutral(text)}\n"
    # One write, so that lines of several processes don't mix; nobody there to read is no error.
    with contextlib.suppress(OSError):
        os.write(2, line.encode(errors="backslashreplace"))


def is_terminal(fd: int) -> bool:
    """Whether the stream is a terminal."""
    return os.isatty(fd)


def terminal_columns(otherwise: int = 80) -> int:
    """The width of the terminal, or of ``COLUMNS``; ``otherwise`` where there is neither."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isascii() and asked.isdecimal() and int(asked) > 0:
        return int(asked)
    try:
        return os.get_terminal_size(1).columns or otherwise
    except OSError:
        return otherwise


def columns(text: str) -> int:
    """How many columns a terminal needs for it."""
    if text.isascii():
        return len(text)
    import unicodedata

    def size(character: str) -> int:
        if unicodedata.combining(character):
            return 0
        return 2 if unicodedata.east_asian_width(character) in "WF" else 1

    return sum(map(size, text))


def wrap(text: str, width: int) -> list[str]:
    """The text in lines of at most ``width`` columns, broken at blanks where there are any.

    >>> wrap("held by web-1", 8), wrap("0123456789", 8), wrap("", 8)
    (['held by', 'web-1'], ['01234567', '89'], [''])
    """
    lines: list[str] = []
    for nth, word in enumerate(text.split(" ")):
        if nth and columns(lines[-1]) + 1 + columns(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines += _pieces(word, width)
    return lines


def _pieces(word: str, width: int) -> list[str]:
    if columns(word) <= width:
        return [word]
    pieces = [""]
    for character in word:
        if pieces[-1] and columns(pieces[-1]) + columns(character) > width:
            pieces.append("")
        pieces[-1] += character
    return pieces


def duration(seconds: float) -> str:
    """How long, as short as it can be said.

    >>> [duration(s) for s in (0.25, 8, 754, 7300, 190000)]
    ['0.2 s', '8 s', '12 m', '2 h', '2 d']
    """
    if not math.isfinite(seconds):  # others wrote it
        return "?"
    if seconds < 1:
        return f"{max(0.0, seconds):.1f} s"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def ago(moment: float) -> str:
    """How long ago, by this machine's clock; clocks that disagree give no negative times."""
    return duration(max(0.0, time.time() - moment))


def clock(moment: float, form: str = "%H:%M") -> str:
    """When, in local time, with the date unless it is today; "?" for what is no time."""
    try:
        then, today = time.localtime(moment), time.localtime()
    except (ValueError, OverflowError, OSError):  # others wrote it
        return "?"
    return time.strftime(form if then[:3] == today[:3] else f"%Y-%m-%d {form}", then)


def since(moment: float) -> str:
    """When, in local time, and how long ago: ``14:03:22 (12 m)``; "?" for what is no time."""
    shown = clock(moment, "%H:%M:%S")
    return shown if shown == "?" else f"{shown} ({ago(moment)})"


def write(text: str) -> None:
    """Writes to standard output; escapes what its encoding lacks."""
    if sys.stdout is None:  # closed by the caller
        return
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
