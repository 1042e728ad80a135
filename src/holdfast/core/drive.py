"""Drives a coroutine that must not suspend: how the blocking client runs the core."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine to its end now; raises ``RuntimeError`` if it suspends, which is a bug.

    >>> async def answer():
    ...     return 42
    >>> run_now(answer())
    42
    """
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError(f"{work!r} suspended under the blocking driver")
