"""What the adapters share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from holdfast.bench.contender import CONTENDED, DRAIN, UNCONTENDED, Client, Pair

__all__ = ["ALL", "ALONE", "WAITS", "nothing", "polling", "split"]

ALONE = frozenset({UNCONTENDED})
WAITS = frozenset({UNCONTENDED, CONTENDED})
ALL = frozenset({UNCONTENDED, CONTENDED, DRAIN})


def nothing() -> None:
    """Where there is nothing to close."""


def split(steps: list[Callable[[], Any]], close: Callable[[], Any] = nothing) -> Client:
    """A client whose hold is a list of steps: the first half acquires, the rest releases."""
    middle = (len(steps) + 1) // 2

    def run(part: list[Callable[[], Any]]) -> Callable[[], Any]:
        if len(part) == 1:
            return part[0]

        def both() -> None:
            for step in part:
                step()

        return both

    return Client(lambda _: Pair(run(steps[:middle]), run(steps[middle:])), close)


def polling(attempt: Callable[[], Any], seconds: float) -> Callable[[], Any]:
    """Tries until it works, as callers of locks without a wait of their own have to."""

    def acquire() -> Any:
        while not (won := attempt()):
            time.sleep(seconds)
        return won

    return acquire
