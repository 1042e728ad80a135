"""A loop that sleeps until its next task, and is told from any thread of one that comes earlier.

Telling it is a comparison as long as it wakes early enough by itself. Nothing here takes a lock,
so a destructor or an interrupt at any point leaves it whole.
"""

# Without "from __future__ import annotations": see holdfast.claim.
from collections import deque
from collections.abc import Callable
from typing import Protocol

from holdfast.core.contract import Runtime
from holdfast.core.hold import NEVER

__all__ = ["UNWATCHED", "Planned", "Watcher"]


class Watcher(Protocol):
    """Who is told of a hold that becomes doubtful before it would look by itself."""

    planned: float

    def plan(self, at: float) -> None: ...


class _Nobody:
    planned = float("-inf")

    def plan(self, at: float) -> None:
        """Nobody is to be told."""


UNWATCHED = _Nobody()


class Planned:
    """What the renewer of a client and the watcher of a process have in common."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.planned = NEVER
        """When the loop wakes by itself, or earlier: nobody need tell it of what comes later."""
        self.plans: deque[float] = deque()
        """What was told since it looked last. Appending is atomic: no plan is ever lost."""
        self.closing = False
        self.signal = runtime.signal()
        self.start: Callable[[], None] = lambda: None
        """Makes sure that the loop runs. The world that drives it sets this."""

    def plan(self, at: float) -> None:
        """Wakes the loop if it would otherwise sleep beyond that."""
        if at < self.planned:
            try:
                self.planned = at
                self.plans.append(at)
                self.start()
                self.signal.set()
            except BaseException:  # an interrupt, or no more threads: who plans next tells it again
                self.planned = NEVER
                raise

    async def _sleep(self, until: float) -> None:
        """Until then, or what was planned for earlier. A round looks at every hold, so that
        somebody registered one for later is no reason for another."""
        while True:
            self.signal.clear()  # before the look: a call in between is not lost
            while self.plans:
                until = min(until, self.plans.popleft())
            self.planned = until
            if self.closing or until <= self.runtime.now():
                return
            if not await self._wait(until):
                return

    async def _wait(self, until: float) -> bool:
        """Whether something new was planned before that time came."""
        return await self.runtime.wait(self.signal, None if until == NEVER else until)

    def forked(self) -> None:
        """In a forked child: whoever waited for the signal is the parent's."""
        self.signal = self.runtime.signal()
        self.planned = NEVER
