"""The loops that look at holds: their base, and the watcher of the ends of holds.

The watcher reports in time that a hold is doubtful or lost, whatever its store does. There is one
per process, for all clients. It reads clocks only: no request, no look-up and no user code runs
here, so nothing can delay it. Renewing is the task of each client's ``Renewer``, the other loop.

A loop sleeps until its next task, and any thread can plan an earlier one. Planning is one
comparison as long as the loop wakes early enough by itself. Nothing here takes a lock, so a
destructor or an interrupt at any point leaves it consistent.
"""

# Without "from __future__ import annotations": see holdfast.lazy.
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from holdfast.core.contract import Runtime
from holdfast.core.hold import NEVER

if TYPE_CHECKING:
    from holdfast.core.renewer import Renewer

__all__ = ["FAILURE_PAUSE_SECONDS", "NO_WATCHER", "EndWatcher", "Plannable", "PlannedLoop"]

FAILURE_PAUSE_SECONDS = 0.5
"""The pause after an unexpected exception in a round."""
TICK_SECONDS = 1.0
"""A timed wait stops while the machine is suspended, and certain time does not. So the clock is
read this often while something is held."""
JUMP_SECONDS = 0.3
"""If the wall clock has gained more than this on the clock of certain time since the last tick, the
machine was perhaps stopped from outside, as for a snapshot or a migration of a virtual machine: the
clock of certain time stood still then, and the store's did not. Or the wall clock was set."""
READING_SECONDS = 0.1
"""Two clocks are compared only if reading them took less than this."""
IDLE_TICKS = 5
"""After this many ticks with nothing held the loop sleeps until the next hold. So a program with
many short holds hardly ever has to wake it."""


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


class EndWatcher(PlannedLoop):
    """All holds of all clients of a process, and the loop that watches their ends."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.renewers: dict[int, Renewer] = {}
        self._idle = 0
        self._wall_ahead = NEVER
        """By how much the wall clock was ahead of the clock of certain time at the last tick."""

    def watch(self, renewer: "Renewer") -> None:
        """Watches the holds of this client from now on."""
        self.renewers[id(renewer)] = renewer
        renewer.watcher = self

    def leave(self, renewer: "Renewer") -> None:
        """Stops watching a client that was closed."""
        self.renewers.pop(id(renewer), None)

    async def run(self) -> None:
        """The loop. It never ends, unless ``closing`` is set."""
        while not self.closing:
            self.planned = NEVER  # a hold that is added from here on wakes the loop
            self._idle = 0
            await self._sleep(self.check_ends())

    def check_ends(self) -> float:
        """Checks the end of every hold once; returns when the next check is due."""
        self._check_clocks()
        now, due = self.runtime.now(), NEVER
        for renewer in list(self.renewers.values()):
            try:
                due = min(due, renewer.check_ends(now))
            except Exception:  # noqa: BLE001 - the others are watched; its renewer logs the same
                due = min(due, now + FAILURE_PAUSE_SECONDS)
        return due

    async def _wait(self, until: float) -> bool:
        tick = self.runtime.now() + TICK_SECONDS
        if until == NEVER or until <= tick:
            return await super()._wait(until)
        return await super()._wait(tick) or self._tick()

    def _tick(self) -> bool:
        """A cheap check between two events; returns whether to go on waiting for the next event."""
        self._check_clocks()
        now, renewers = self.runtime.now(), list(self.renewers.values())
        for renewer in renewers:
            if renewer.planned <= now:  # it waits for a time that has passed in a suspend
                renewer.signal.set()
        self._idle = 0 if any(renewer.holds for renewer in renewers) else self._idle + 1
        return self._idle <= IDLE_TICKS

    def _check_clocks(self) -> None:
        """Has everything renewed now if the wall clock has jumped ahead. That ends no hold by
        itself: the wall clock may just have been set. The store's answer decides."""
        before, wall, now = self.runtime.now(), self.runtime.wall(), self.runtime.now()
        if now - before > READING_SECONDS:  # this thread stood still in between
            return
        gained = wall - now - self._wall_ahead
        self._wall_ahead = wall - now
        if gained > JUMP_SECONDS:
            for renewer in list(self.renewers.values()):
                renewer.renew_all()

    def forked(self) -> None:
        super().forked()
        self.plans.clear()
        self.renewers.clear()
