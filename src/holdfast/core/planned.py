"""A loop that sleeps until its next task. Any thread can plan an earlier task.

Planning is one comparison as long as the loop wakes early enough by itself. Nothing here takes a
lock, so a destructor or an interrupt at any point leaves it consistent.
"""

# Without "from __future__ import annotations": see holdfast.lazy.
from collections import deque
from collections.abc import Callable
from typing import Protocol

from holdfast.core.contract import Runtime
from holdfast.core.hold import NEVER

__all__ = ["NO_WATCHER", "Plannable", "PlannedLoop"]


class Plannable(Protocol):
    """A loop that can be asked to wake earlier than ``planned``."""

    planned: float

    def plan(self, at: float) -> None: ...


class _NoWatcher:
    planned = float("-inf")

    def plan(self, at: float) -> None:
        """Does nothing."""


NO_WATCHER = _NoWatcher()


class PlannedLoop:
    """The base of the renewer of a client and of the watcher of a process."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.planned = NEVER
        """When the loop wakes by itself, or earlier. A task that is due later need not be
        planned."""
        self.plans: deque[float] = deque()
        """Times planned since the loop last looked. Appending is atomic: no plan is ever lost."""
        self.closing = False
        self.signal = runtime.signal()
        self.start: Callable[[], None] = lambda: None
        """Makes sure that the loop runs. Set by the code that drives the loop."""

    def plan(self, at: float) -> None:
        """Wakes the loop if it would otherwise sleep beyond ``at``."""
        if at < self.planned:
            try:
                self.planned = at
                self.plans.append(at)
                self.start()
                self.signal.set()
            except BaseException:  # an interrupt, or no more threads: the next plan tries again
                self.planned = NEVER
                raise

    async def _sleep(self, until: float) -> None:
        """Sleeps until the given time, or until an earlier planned time. A round of the loop checks
        every hold, so a hold that is registered for later is no reason for another round."""
        while True:
            self.signal.clear()  # before the look at the plans: a signal in between is not lost
            while self.plans:
                until = min(until, self.plans.popleft())
            self.planned = until
            if self.closing or until <= self.runtime.now():
                return
            if not await self._wait(until):
                return

    async def _wait(self, until: float) -> bool:
        """Returns whether something new was planned before that time."""
        return await self.runtime.wait(self.signal, None if until == NEVER else until)

    def forked(self) -> None:
        """In a forked child: the thread that waits for the old signal belongs to the parent."""
        self.signal = self.runtime.signal()
        self.planned = NEVER
