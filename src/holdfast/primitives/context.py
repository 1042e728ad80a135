"""Context managers of locks: each ``with`` block has an exit object of its own.

An interrupt (Ctrl-C) may arrive exactly when ``__enter__`` returns or ``__exit__`` begins. The
interpreter then never calls ``__exit__``. So the lock must not keep the lease of a block alive: the
``with`` statement does, through the exit object of this block. If an interrupt destroys the block,
the lease becomes a dropped handle like any other, and is released.

This works because ``with`` looks up ``__exit__``, through ``__get__``, before it calls
``__enter__``. A caller that calls both by hand (``ExitStack`` does) gets the plain function, and
the lock keeps the lease for that caller.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import ref

from holdfast.errors import NotHeld
from holdfast.one_process import OneProcess

if TYPE_CHECKING:
    from holdfast.core.engine import Engine

__all__ = ["Block", "BlockExit", "LockContext"]


class Held(Protocol):
    """What a block gives: a lease, or several."""

    @property
    def _acquired_by(self) -> Hashable: ...


T = TypeVar("T", bound=Held)


class Block:
    """One ``with`` block: its lease once it is entered, and its exit function."""

    __slots__ = ("__weakref__", "_lock", "lease")

    def __init__(self, lock: LockContext[Any]) -> None:
        self._lock = lock
        self.lease: Any = None

    def __call__(self, kind: object, error: BaseException | None, trace: object) -> Any:
        return self._lock._exit_block(self.lease, error)


class LockContext(OneProcess, Generic[T]):
    """Base of locks: entered and exited by any number of threads or tasks at once."""

    __slots__ = ("_engine", "_entered_by_hand", "_entering")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._entering: dict[Hashable, ref[Block]] = {}
        self._entered_by_hand: list[T] = []

    def _exit_block(self, lease: T | None, error: BaseException | None) -> Any:
        """Ends the block of this lease. Without a lease: the newest block entered by hand."""
        raise NotImplementedError

    def _entering_block(self) -> Block | None:
        """The block that is being entered; ``None`` if ``__enter__`` was called by hand."""
        made = self._entering.pop(self._engine.runtime.me(), None)
        return None if made is None else made()

    def _entered(self, block: Block | None, lease: T) -> None:
        """Stores the lease in its block, or in the lock if there is no block."""
        if block is not None:
            block.lease = lease
        else:
            self._entered_by_hand.append(lease)

    def _exiting_lease(self, lease: T | None) -> T:
        """The lease of the block that is being exited; raises ``NotHeld`` if there is none."""
        if lease is not None:
            return lease
        me = self._engine.runtime.me()
        mine = [held for held in self._entered_by_hand if held._acquired_by == me]
        if not mine and len(self._entered_by_hand) == 1:
            mine = self._entered_by_hand  # entered in one thread or task, exited in another
        if not mine:
            raise NotHeld(f"this {self._engine.caller_kind} has no open block of {self!r}")
        newest = mine[-1]
        self._entered_by_hand.remove(newest)
        return newest


class BlockExit:
    """The descriptor that is ``__exit__`` or ``__aexit__`` of a lock: makes a ``Block``."""

    def __get__(self, lock: LockContext[Any] | None, owner: type) -> Callable[..., Any]:
        if lock is None:
            return _exit_by_hand
        block = Block(lock)
        lock._entering[lock._engine.runtime.me()] = ref(block)
        return block


def _exit_by_hand(
    lock: LockContext[Any], _: object, error: BaseException | None, __: object
) -> Any:
    return lock._exit_block(None, error)
