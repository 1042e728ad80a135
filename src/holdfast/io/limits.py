"""Limits that no interrupt can break: connections open at once, and one opener at a time.

An exception may come between any two lines. A counter that one line increments and another line
decrements is wrong for good after such an exception, and then all permits are taken and nothing
has them. So a permit is an object that its connection refers to, and the limit counts the permits
that still exist.
"""

from __future__ import annotations

import threading
from weakref import WeakSet

from holdfast.io.clock import between, now

__all__ = ["ConnectionLimit", "Permit", "SingleFlight", "look_by", "open_by"]

LOOK_SECONDS = (0.2, 0.5)
"""How often a waiter looks where no subscription reaches it."""
LEAST_OPENING_SECONDS = 0.5
"""A subscription gets so long to open also for a wait that is shorter: the next one needs it."""


class Permit:
    """Room for one connection, for as long as somebody has it."""

    __slots__ = ("__weakref__",)


class ConnectionLimit:
    """So many places, and those who wait for one."""

    def __init__(self, connections: int) -> None:
        self.connections = connections
        self.waiting = 0
        """How many wait, or a little more: worth a call when a connection is free."""
        self._taken: WeakSet[Permit] = WeakSet()
        # Entered directly: the condition's own way in is Python code, and an interrupt in there
        # leaves it locked for ever.
        self.mutex = threading.RLock()
        self._called = threading.Condition(self.mutex)

    def take(self) -> Permit | None:
        """A place, if there is one."""
        with self.mutex:
            if len(self._taken) >= self.connections:
                return None
            permit = Permit()
            self._taken.add(permit)
            return permit

    def free(self, permit: Permit | None) -> None:
        """Its connection is gone, or did not come about."""
        with self.mutex:
            if permit is not None:
                self._taken.discard(permit)
            self._called.notify()

    def wait(self, seconds: float) -> bool:
        """Whether somebody called meanwhile. With the mutex, under which what is waited for was
        looked at: whoever has something new looks at ``waiting`` first, and calls under it, too."""
        return self._called.wait(max(0.0, seconds))

    def call(self) -> None:
        """A connection is free."""
        with self.mutex:
            self._called.notify()


def open_by(until: float, seconds: float) -> float:
    """By when a subscription is to be open, for one who waits until then; ``seconds`` at the
    most."""
    moment = now()
    return min(moment + seconds, max(until, moment + LEAST_OPENING_SECONDS))


def look_by(until: float) -> float:
    """When one who waits until then looks for itself."""
    return min(until, now() + between(*LOOK_SECONDS))


class SingleFlight:
    """The right to open it, which one has at a time. No interrupt loses it."""

    def __init__(self) -> None:
        self._connection_limit = ConnectionLimit(1)
        self._not_before = 0.0

    def begin(self) -> Permit | None:
        """The right, for as long as somebody has it; nothing while another one does, or rests."""
        return self._connection_limit.take() if now() >= self._not_before else None

    def end(self, permit: Permit) -> None:
        self._connection_limit.free(permit)

    def failed(self, since: float) -> None:
        """It was tried in vain: nobody tries again for as long as that took."""
        moment = now()
        self._not_before = moment + (moment - since)
