"""The watcher: tells in time that a hold is doubtful or lost, whatever its store does.

One per process, for all clients. It looks at clocks only: no request, no look-up and no code of
the user's runs here, so nothing can delay it. Renewing is left to the ``Renewer`` of each client.
"""

# Without "from __future__ import annotations": see holdfast.claim.
from holdfast.core.contract import Runtime
from holdfast.core.hold import NEVER
from holdfast.core.planned import Planned
from holdfast.core.renewer import MISHAP_SECONDS, Renewer

__all__ = ["Watch"]

TICK_SECONDS = 1.0
"""A timed wait stands still while the machine is suspended, and certain time does not: while
something is held, the clock is read so often."""
IDLE_TICKS = 5
"""After so many ticks with nothing held it sleeps until the next hold, so that a program with
many short holds hardly ever has to wake it."""


class Watch(Planned):
    """All that the clients of a process hold, and the loop that watches it."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.renewers: dict[int, Renewer] = {}
        self._idle = 0

    def watch(self, renewer: Renewer) -> None:
        """Watches what this client holds, from now on."""
        self.renewers[id(renewer)] = renewer
        renewer.watch = self

    def leave(self, renewer: Renewer) -> None:
        """The client was closed."""
        self.renewers.pop(id(renewer), None)

    async def run(self) -> None:
        """The loop: it never ends."""
        while not self.closing:
            self.planned = NEVER  # whoever registers from here on tells us
            self._idle = 0
            await self._sleep(self.look())

    def look(self) -> float:
        """One look at the end of every hold; answers when the next is due."""
        now, due = self.runtime.now(), NEVER
        for renewer in list(self.renewers.values()):
            try:
                due = min(due, renewer.judge(now))
            except Exception:  # noqa: BLE001 - the others are watched; its renewer logs the same
                due = min(due, now + MISHAP_SECONDS)
        return due

    async def _wait(self, until: float) -> bool:
        tick = self.runtime.now() + TICK_SECONDS
        if until == NEVER or until <= tick:
            return await super()._wait(until)
        return await super()._wait(tick) or self._tick()

    def _tick(self) -> bool:
        """A cheap look between two events; whether to go on waiting for the next of them."""
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
