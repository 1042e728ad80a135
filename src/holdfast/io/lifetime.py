"""Fork and exit of the process: hooks for clients and renewers.

This module refers to clients weakly, and to a renewer while its thread runs: so what a renewer
holds is released at interpreter exit even if its client is garbage.
"""

from __future__ import annotations

import atexit
import os
from typing import Protocol
from weakref import WeakSet

from holdfast.io.clock import now

__all__ = ["at_exit", "at_fork", "close_at_exit", "ended", "leave", "leaving"]

EXIT_SECONDS = 1.0


class Forkable(Protocol):
    """An object with a hook that runs in the child after a fork."""

    def forked(self) -> None: ...


class Endable(Protocol):
    """An object with a hook that runs at interpreter exit."""

    def end(self, seconds: float) -> None:
        """Starts to end in the background, and waits for that at most ``seconds``."""
        ...


_clients: WeakSet[Forkable] = WeakSet()
_renewers: set[Endable] = set()
_idle: WeakSet[Endable] = WeakSet()
_leaving = False


def at_fork(client: Forkable) -> None:
    """Calls ``forked()`` of the object in a forked child, while the object exists."""
    _clients.add(client)


def close_at_exit(renewer: Endable) -> None:
    """Calls ``end()`` of a renewer that was never started, if it exists at interpreter exit: so the
    connections of its client are closed."""
    _idle.add(renewer)


def at_exit(renewer: Endable) -> None:
    """Calls ``end()`` of the renewer at interpreter exit, unless ``ended`` was called before."""
    _idle.discard(renewer)
    _renewers.add(renewer)


def ended(renewer: Endable) -> None:
    """Removes the renewer: it has nothing to do at interpreter exit."""
    _idle.discard(renewer)
    _renewers.discard(renewer)


def leave() -> None:
    """Declares that the process calls ``os._exit`` as soon as its clients are closed."""
    global _leaving
    _leaving = True


def leaving() -> bool:
    """Whether ``leave`` was called: descriptors may then be left for the system to close."""
    return _leaving


def _forked() -> None:
    global _leaving
    _leaving = False  # it was declared by the parent
    _renewers.clear()  # their threads are the parent's
    for client in list(_clients):
        client.forked()


def _exit() -> None:
    # All at the same time, within one second: a store that hangs does not delay the others.
    until = now() + EXIT_SECONDS
    for renewer in list(_renewers):
        renewer.end(0.0)
    for renewer in list(_renewers):
        renewer.end(max(0.0, until - now()))
    for renewer in list(_idle):  # last: these have nothing to release
        if now() < until:
            renewer.end(0.0)


atexit.register(_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
