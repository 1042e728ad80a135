"""Readers together, writers alone; a waiting writer is not starved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from holdfast.claim import Mode
from holdfast.primitives.lock import LockBase

if TYPE_CHECKING:
    from holdfast.core.engine import Engine
    from holdfast.primitives.terms import Terms

__all__ = ["ReadWriteLock"]

K = TypeVar("K", bound=LockBase[Any])


class ReadWriteLock(Generic[K]):
    """Gives the two locks of a name. ``write()`` and ``lock()`` of one name are the same claim."""

    __slots__ = ("_engine", "_lock", "_terms", "name")

    def __init__(self, lock: type[K], engine: Engine, name: str, terms: Terms) -> None:
        self.name = name
        self._lock, self._engine, self._terms = lock, engine, terms

    def read(self) -> K:
        """A lock that readers share."""
        return self._lock(self._engine, self.name, self._terms, Mode.SHARED)

    def write(self) -> K:
        """A lock that is held alone."""
        return self._lock(self._engine, self.name, self._terms, Mode.EXCLUSIVE)

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self.name!r} on {self._engine.store.display}>"
