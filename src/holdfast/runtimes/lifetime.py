"""Forks and the interpreter's end: every open door is told."""

from __future__ import annotations

import atexit
import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["watch"]


class Mortal(Protocol):
    """What wants to be told."""

    def forked(self) -> None: ...
    def exit(self) -> None: ...


_open: WeakSet[Mortal] = WeakSet()
_installed = False


def watch(door: Mortal) -> None:
    """Tells the door of a fork (in the child) and of the interpreter's end, while it lives."""
    global _installed
    _open.add(door)
    if not _installed:
        _installed = True
        atexit.register(_exit)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    for door in list(_open):
        door.forked()


def _exit() -> None:
    for door in list(_open):
        door.exit()
