"""Forks and the interpreter's end: every door is told of the first, every keeper of the second.

Doors are known weakly. Keepers are known while their thread runs: what they keep is released at
the interpreter's end even if nobody has the door any more.
"""

from __future__ import annotations

import atexit
import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["at_exit", "at_fork", "ended"]


class Forkable(Protocol):
    """What wants to be told, in the child, that it is a fork."""

    def forked(self) -> None: ...


class Endable(Protocol):
    """What wants to be told that the interpreter ends."""

    def exit(self) -> None: ...


_doors: WeakSet[Forkable] = WeakSet()
_keepers: set[Endable] = set()


def at_fork(door: Forkable) -> None:
    """Tells it of forks while it lives."""
    _doors.add(door)


def at_exit(keeper: Endable) -> None:
    """Tells it of the interpreter's end, unless it has ended before."""
    _keepers.add(keeper)


def ended(keeper: Endable) -> None:
    """It has nothing left to do at the interpreter's end."""
    _keepers.discard(keeper)


def _forked() -> None:
    _keepers.clear()  # their threads are the parent's
    for door in list(_doors):
        door.forked()


def _exit() -> None:
    for keeper in list(_keepers):
        keeper.exit()


atexit.register(_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
