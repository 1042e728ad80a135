"""Limits that no interrupt can break: connections open at once, and one opener at a time.

An exception may come between any two lines. A counter that one line increments and another line
decrements is wrong for good after such an exception, and then all permits are taken and nothing
has them. So a permit is an object that its connection refers to, and the limit counts the permits
that still exist.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from weakref import WeakSet

from holdfast.core.backoff import STORE_POLL_SECONDS
from holdfast.io.clock import between, now

__all__ = ["ConnectionLimit", "Permit", "SingleFlight", "look_by", "open_by"]

LEAST_OPEN_SECONDS = 0.5
"""A subscription has at least this long to open, also if the wait is shorter: the next wait needs
it, too."""


RECHECK_SECONDS = 0.5
"""How often a thread that waits for a connection looks by itself: an interrupt of another thread
may have lost the notification."""

T = TypeVar("T")


class Permit:
    """The right to one connection, for as long as this object exists."""

    __slots__ = ("__weakref__",)


class ConnectionLimit:
    """A limited number of permits, and threads that wait for one."""

    def __init__(self, connections: int) -> None:
        self.connections = connections
        self.waiters: deque[queue.SimpleQueue[None]] = deque()
        """The threads that wait in ``admit``. If there are any, ``call`` when a connection is
        free."""
        self._taken: WeakSet[Permit] = WeakSet()
        # Re-entrant: a signal handler may take a permit while its own thread runs code in here.
        self.mutex = threading.RLock()

    def take(self) -> Permit | None:
        """A permit, or ``None`` if all are taken."""
        with self.mutex:
            if len(self._taken) >= self.connections:
                return None
            permit = Permit()
            self._taken.add(permit)
            return permit

    def free(self, permit: Permit | None) -> None:
        """Gives a permit back: its connection is closed, or could not be opened."""
        with self.mutex:
            if permit is not None:
                self._taken.discard(permit)
        self.call()

    def admit(self, idle: Callable[[], T | None], until: float) -> T | Permit | None:
        """An idle connection, or a permit for a new one; waits for either. ``None`` if there is
        none by ``until``."""
        # A queue of its own for each thread, and no condition: an interrupt in ``Condition.wait``
        # may come when its mutex is not locked again.
        waiter: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            while True:
                self.waiters.append(waiter)  # first: from here on no notification is lost
                found = idle() or self.take()
                left = until - now()
                if found is not None or left <= 0:
                    return found
                with suppress(queue.Empty):
                    waiter.get(timeout=min(left, RECHECK_SECONDS))
                self._leave(waiter)
        finally:
            self._leave(waiter)
            if self.waiters:  # this thread may have been notified, and did not need it
                self.call()

    def _leave(self, waiter: queue.SimpleQueue[None]) -> None:
        with suppress(ValueError):  # it was notified
            self.waiters.remove(waiter)

    def call(self) -> None:
        """Notifies one waiter: a connection is free."""
        with suppress(IndexError):
            self.waiters.popleft().put(None)


def open_by(until: float, seconds: float) -> float:
    """The deadline to open a subscription, for a wait until ``until``; at most ``seconds`` from
    now."""
    moment = now()
    return min(moment + seconds, max(until, moment + LEAST_OPEN_SECONDS))


def look_by(until: float) -> float:
    """When a waiter without a subscription checks the store itself; ``until`` at the latest."""
    return min(until, now() + between(*STORE_POLL_SECONDS))


class SingleFlight:
    """The right to open a subscription that many waiters share: one caller has it at a time.

    Opening may take seconds on a broken network, so the other waiters do not wait for it: they have
    their own deadlines. And a second caller may be the same thread, in a signal handler, which
    would wait for itself for ever. A waiter without a subscription polls (``look_by``). An
    interrupt does not lose the right.
    """

    def __init__(self) -> None:
        self._connection_limit = ConnectionLimit(1)
        self._not_before = 0.0

    def begin(self) -> Permit | None:
        """The right, for as long as the permit exists; ``None`` while another caller has it, or
        during the pause after a failure."""
        return self._connection_limit.take() if now() >= self._not_before else None

    def end(self, permit: Permit) -> None:
        """Gives the right back."""
        self._connection_limit.free(permit)

    def failed(self, since: float) -> None:
        """Opening failed, having begun at ``since``: pauses for as long as that took."""
        moment = now()
        self._not_before = moment + (moment - since)
