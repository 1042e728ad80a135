"""Names that a client is just leaving: who of the same client asks for one of them waits for that.

The next in a client's own line asks as soon as it is the first, which is often in the moment in
which the one before it leaves. Two requests that race for one row cost more than two in a row.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol

from holdfast.core.contract import Runtime
from holdfast.io.clock import now

__all__ = ["Leaving", "make_leaving"]

LONGEST_SECONDS = 5.0
"""Nothing rests on the order: who has waited for so long asks all the same."""


class Leaving(Protocol):
    """Waits that end when a name has been left."""

    names: dict[str, None]
    """Whoever leaves puts the name in here before it asks, and says ``left`` afterwards."""

    def left(self, name: str) -> None: ...
    async def wait(self, name: str, until: float | None) -> None: ...


def make_leaving(runtime: Runtime) -> Leaving:
    """By the world that it is for."""
    return BlockingLeaving() if runtime.blocking else AsyncLeaving()


class BlockingLeaving:
    """For threads."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._waiting = 0
        self._mutex = threading.RLock()  # entered directly: the condition's own way can be torn
        self._changed = threading.Condition(self._mutex)

    def left(self, name: str) -> None:
        self.names.pop(name, None)
        if self._waiting:  # who is not counted yet looks at the names after that
            with self._mutex:
                self._changed.notify_all()

    async def wait(self, name: str, until: float | None) -> None:
        by = now() + LONGEST_SECONDS
        by = by if until is None else min(by, until)
        with self._mutex:
            self._waiting += 1
            try:
                while name in self.names and (left := by - now()) > 0:
                    self._changed.wait(left)
            finally:
                self._waiting -= 1


class AsyncLeaving:
    """For the tasks of one loop."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def left(self, name: str) -> None:
        self.names.pop(name, None)
        for future in self._waiting.pop(name, ()):
            if not future.done():
                future.set_result(None)

    async def wait(self, name: str, until: float | None) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(future)
        left = LONGEST_SECONDS if until is None else min(LONGEST_SECONDS, until - now())
        await asyncio.wait([future], timeout=max(0.0, left))
