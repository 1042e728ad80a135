"""Forks and the process's end: every client is told of the first, every renewer of the second.

Clients are known weakly. Renewers are known while their thread runs: what they keep is released at
the interpreter's end even if nobody has the client any more.
"""

from __future__ import annotations

import atexit
import os
from typing import Protocol
from weakref import WeakSet

from holdfast.io.clock import now

__all__ = ["at_exit", "at_fork", "ended", "leave", "leaving"]

EXIT_SECONDS = 1.0


class Forkable(Protocol):
    """What wants to be told, in the child, that it is a fork."""

    def forked(self) -> None: ...


class Endable(Protocol):
    """What wants to be told that the interpreter ends."""

    def end(self, seconds: float) -> None:
        """Ends in the background; waits for that so long."""
        ...


_clients: WeakSet[Forkable] = WeakSet()
_renewers: set[Endable] = set()
_leaving = False


def at_fork(engine: Forkable) -> None:
    """Tells it of forks while it lives."""
    _clients.add(engine)


def at_exit(renewer: Endable) -> None:
    """Tells it of the interpreter's end, unless it has ended before."""
    _renewers.add(renewer)


def ended(renewer: Endable) -> None:
    """It has nothing left to do at the interpreter's end."""
    _renewers.discard(renewer)


def leave() -> None:
    """Says that the process ends by ``os._exit`` as soon as its clients are closed."""
    global _leaving
    _leaving = True


def leaving() -> bool:
    """Whether what the system closes by itself may be left to it."""
    return _leaving


def _forked() -> None:
    global _leaving
    _leaving = False  # that was said of the parent
    _renewers.clear()  # their threads are the parent's
    for engine in list(_clients):
        engine.forked()


def _exit() -> None:
    # All at once, and all within one second: a store that hangs takes no time from the others.
    until = now() + EXIT_SECONDS
    for renewer in list(_renewers):
        renewer.end(0.0)
    for renewer in list(_renewers):
        renewer.end(max(0.0, until - now()))


atexit.register(_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
