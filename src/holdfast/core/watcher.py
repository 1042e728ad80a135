"""The watcher: reports in time that a hold is doubtful or lost, whatever its store does.

One per process, for all clients. It reads clocks only: no request, no look-up and no user code runs
here, so nothing can delay it. Renewing is the task of each client's ``Renewer``.
"""

# Without "from __future__ import annotations": see holdfast.lazy.
from holdfast.core.contract import Runtime
from holdfast.core.hold import NEVER
from holdfast.core.planned import PlannedLoop
from holdfast.core.renewer import FAILURE_PAUSE_SECONDS, Renewer

__all__ = ["EndWatcher"]

TICK_SECONDS = 1.0
"""A timed wait stops while the machine is suspended, and certain time does not. So the clock is
read this often while something is held."""
IDLE_TICKS = 5
"""After this many ticks with nothing held the loop sleeps until the next hold. So a program with
many short holds hardly ever has to wake it."""


class EndWatcher(PlannedLoop):
    """All holds of all clients of a process, and the loop that watches their ends."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.renewers: dict[int, Renewer] = {}
        self._idle = 0

    def watch(self, renewer: Renewer) -> None:
        """Watches the holds of this client from now on."""
        self.renewers[id(renewer)] = renewer
        renewer.watcher = self

    def leave(self, renewer: Renewer) -> None:
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
        now, renewers = self.runtime.now(), list(self.renewers.values())
        for renewer in renewers:
            if renewer.planned <= now:  # it waits for a time that has passed in a suspend
                renewer.signal.set()
        self._idle = 0 if any(renewer.holds for renewer in renewers) else self._idle + 1
        return self._idle <= IDLE_TICKS

    def forked(self) -> None:
        super().forked()
        self.plans.clear()
        self.renewers.clear()
