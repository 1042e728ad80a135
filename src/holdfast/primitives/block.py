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

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import ref

from holdfast.errors import NotHeld

if TYPE_CHECKING:
    from holdfast.core.engine import Engine

__all__ = ["Block", "Entered", "WayOut"]


class Held(Protocol):
    """What a block gives: a lease, or several."""

    @property
    def _who(self) -> Hashable: ...


T = TypeVar("T", bound=Held)


class Block:
    """One block: its lease, once it was entered, and the way out."""

    __slots__ = ("__weakref__", "_lock", "lease")

    def __init__(self, lock: Entered[Any]) -> None:
        self._lock = lock
        self.lease: Any = None

    def __call__(self, kind: object, error: BaseException | None, trace: object) -> Any:
        return self._lock._leave(self.lease, error)


class Entered(Generic[T]):
    """A lock that is entered and left, by any number of threads or tasks at once."""

    __slots__ = ("_by_hand", "_engine", "_entering")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._entering: dict[Hashable, ref[Block]] = {}
        self._by_hand: list[T] = []

    def _leave(self, lease: T | None, error: BaseException | None) -> Any:
        """Ends the block of a lease; of the newest that was entered by hand if there is none."""
        raise NotImplementedError

    def _begin(self) -> Block | None:
        """The block that is being entered; none if ``__enter__`` was called by hand."""
        made = self._entering.pop(self._engine.runtime.me(), None)
        return None if made is None else made()

    def _opened(self, block: Block | None, lease: T) -> None:
        if block is not None:
            block.lease = lease
        else:
            self._by_hand.append(lease)

    def _closing(self, lease: T | None) -> T:
        """The lease of the block that is being left."""
        if lease is not None:
            return lease
        me = self._engine.runtime.me()
        mine = [held for held in self._by_hand if held._who == me]
        if not mine and len(self._by_hand) == 1:
            mine = self._by_hand  # entered in one thread or task, and left in another
        if not mine:
            raise NotHeld(f"this {self._engine.who} has no open block of {self!r}")
        newest = mine[-1]
        self._by_hand.remove(newest)
        return newest


class WayOut:
    """What ``__exit__`` and ``__aexit__`` are on a lock."""

    def __get__(self, lock: Entered[Any] | None, owner: type) -> Callable[..., Any]:
        if lock is None:
            return _leave_by_hand
        block = Block(lock)
        lock._entering[lock._engine.runtime.me()] = ref(block)
        return block


def _leave_by_hand(lock: Entered[Any], _: object, error: BaseException | None, __: object) -> Any:
    return lock._leave(None, error)
