"""Interrupts, or signal handlers, at a chosen line of a function."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

__all__ = ["handled_at", "lines_of", "torn_at"]


def _interrupt() -> None:
    raise KeyboardInterrupt


def torn_at(code: Any, line: int, work: Callable[[], object]) -> None:
    """Raises ``KeyboardInterrupt`` in the work when it reaches a line of a function, once."""
    with suppress(KeyboardInterrupt):
        handled_at(code, line, work, _interrupt)


def handled_at(
    code: Any, line: int, work: Callable[[], object], handle: Callable[[], object]
) -> None:
    """Calls a handler in the work when it reaches a line of a function, once."""
    hit = False

    def local(frame: FrameType, event: str, _: object) -> Any:
        nonlocal hit
        if event == "line" and frame.f_lineno == line and not hit:
            hit = True
            handle()
        return local

    def trace(frame: FrameType, event: str, _: object) -> Any:
        return local if frame.f_code is code else None

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)


def lines_of(function: Any) -> list[tuple[str, int]]:
    _, first = inspect.getsourcelines(function)
    steps = {line for _, _, line in function.__code__.co_lines() if line and line > first}
    return [(function.__name__, line) for line in sorted(steps)]
