"""The way out of a ``with`` block, made anew for each block and held by nothing but the block.

An interrupt (Ctrl-C) may strike in the very moment in which ``__enter__`` returns or
``__exit__`` begins; the interpreter then calls no ``__exit__`` at all. So the lock must not be
what keeps a block's lease alive: the ``with`` statement does, through its own way out. When it
is torn apart the lease is a dropped handle like any other, and is released.

It works because ``with`` looks ``__exit__`` up, through ``__get__``, before it calls
``__enter__``. Who calls the two by hand (``ExitStack`` does) gets the plain function, and the
lock keeps the lease for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

from holdfast.lease import LeaseBase

__all__ = ["Block", "WayOut"]


class Entered(Protocol):
    """A lock that is entered and left."""

    _entering: dict[Any, ref[Block]]
    _door: Any

    def _leave(self, lease: LeaseBase | None, error: BaseException | None) -> Any: ...


class Block:
    """One block: its lease, once it was entered, and the way out."""

    __slots__ = ("__weakref__", "_lock", "lease")

    def __init__(self, lock: Entered) -> None:
        self._lock = lock
        self.lease: LeaseBase | None = None

    def __call__(self, kind: object, error: BaseException | None, trace: object) -> Any:
        return self._lock._leave(self.lease, error)


class WayOut:
    """What ``__exit__`` and ``__aexit__`` are on a lock."""

    def __get__(self, lock: Entered | None, owner: type) -> Callable[..., Any]:
        if lock is None:
            return _leave_by_hand
        block = Block(lock)
        lock._entering[lock._door.runtime.me()] = ref(block)
        return block


def _leave_by_hand(lock: Entered, _: object, error: BaseException | None, __: object) -> Any:
    return lock._leave(None, error)
