"""How many connections may be open at once, counted so that no interrupt loses a place.

An exception may come between any two lines: whatever counts up in one and down in another is off
for good some day, and then every place is taken and nobody has it. So a place is an object that
its connection has, and the room counts those that are still there.
"""

from __future__ import annotations

import threading
from weakref import WeakSet

__all__ = ["ConnectionLimit", "Permit"]


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
