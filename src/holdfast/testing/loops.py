"""The event loop on which the suites run.

``HOLDFAST_TEST_LOOP`` names a module with a function ``new_event_loop``, such as ``uvloop``;
without it asyncio's own loop is used. Worker processes inherit the choice.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["new_runner", "run"]

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end on a new loop of the chosen kind, as ``asyncio.run`` does.

    >>> async def add(one: int, other: int) -> int:
    ...     return one + other
    >>> run(add(1, 2))
    3
    """
    with new_runner() as runner:
        return runner.run(work)


def new_runner() -> asyncio.Runner:
    """A runner whose loop is of the chosen kind."""
    module = importlib.import_module(os.environ.get("HOLDFAST_TEST_LOOP") or "asyncio")
    return asyncio.Runner(loop_factory=module.new_event_loop)
