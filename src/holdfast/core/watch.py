"""The watcher: tells in time that a hold is doubtful or lost, whatever its store does.

One per process, for all clients. It looks at clocks only: no request, no look-up and no code of
the user's runs here, so nothing can delay it. Renewing is left to the ``Keep`` of each client.
"""

# Without "from __future__ import annotations": see holdfast.claim.
from holdfast.core.contract import Runtime
from holdfast.core.hold import NEVER
from holdfast.core.keep import MISHAP_SECONDS, Keep
from holdfast.core.planned import Planned

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
        self.keeps: dict[int, Keep] = {}
        self._idle = 0

    def watch(self, keep: Keep) -> None:
        """Watches what this client holds, from now on."""
        self.keeps[id(keep)] = keep
        keep.watch = self

    def leave(self, keep: Keep) -> None:
        """The client was closed."""
        self.keeps.pop(id(keep), None)

    async def run(self) -> None:
        """The loop: it never ends."""
        while not self.closing:
            self.planned = NEVER  # whoever registers from here on tells us
            self._idle = 0
            await self._sleep(self.look())

    def look(self) -> float:
        """One look at the end of every hold; answers when the next is due."""
        now, due = self.runtime.now(), NEVER
        for keep in list(self.keeps.values()):
            try:
                due = min(due, keep.judge(now))
            except Exception:  # noqa: BLE001 - the others are watched; its keeper logs the same
                due = min(due, now + MISHAP_SECONDS)
        return due

    async def _wait(self, until: float) -> bool:
        tick = self.runtime.now() + TICK_SECONDS
        if until == NEVER or until <= tick:
            return await super()._wait(until)
        return await super()._wait(tick) or self._tick()

    def _tick(self) -> bool:
        """A cheap look between two events; whether to go on waiting for the next of them."""
        now, keeps = self.runtime.now(), list(self.keeps.values())
        for keep in keeps:
            if keep.planned <= now:  # it waits for a time that has passed in a suspend
                keep.signal.set()
        self._idle = 0 if any(keep.holds for keep in keeps) else self._idle + 1
        return self._idle <= IDLE_TICKS

    def forked(self) -> None:
        super().forked()
        self.plans.clear()
        self.keeps.clear()
