"""Tells a stall of the machine apart from a fault of a store."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Self

from holdfast.io.clock import now

__all__ = ["Stalls", "in_some_try"]

TRIES = 10


async def in_some_try(work: Callable[[], Awaitable[bool]], otherwise: str) -> None:
    """Repeats work that answers False if the machine stood still, so that its result proves
    nothing; raises ``AssertionError`` after ``TRIES`` times."""
    for _ in range(TRIES):
        if await work():
            return
    raise AssertionError(f"{otherwise}, {TRIES} times out of {TRIES}")


class Stalls:
    """How long the machine stood still during a block: what should have come soon came as late for
    everybody."""

    BEAT_SECONDS = 0.01

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        before = now()
        while not self._over.wait(self.BEAT_SECONDS):
            before, late = now(), now() - before - self.BEAT_SECONDS
            self.seconds += late if late > self.BEAT_SECONDS else 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
