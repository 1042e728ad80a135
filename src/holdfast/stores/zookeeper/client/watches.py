"""Who is told of the events of a node, by its path.

Every step is one that no other thread can divide, and none waits for another: a signal's handler
may come between any two of them, and wait for a lock of the same session itself.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Signal", "Watches"]

Signal = Callable[[], None]


class Watches:
    """The watches of one session."""

    def __init__(self) -> None:
        self._first: dict[str, Signal] = {}
        """The only one for nearly every path, and the only one who takes itself out again."""
        self._others: dict[tuple[str, Signal], None] = {}
        """Those who came when there was one: not many, so they are looked through."""

    def __bool__(self) -> bool:
        return bool(self._first or self._others)

    def add(self, path: str, signal: Signal) -> None:
        if self._first.setdefault(path, signal) != signal:
            self._others[path, signal] = None

    def remove(self, path: str, signal: Signal) -> None:
        self._others.pop((path, signal), None)
        if self._first.get(path) == signal:
            self._first.pop(path, None)

    def of(self, path: str) -> list[Signal]:
        first = self._first.get(path)
        found = [] if first is None else [first]
        if self._others:
            found += [signal for watched, signal in list(self._others) if watched == path]
        return found

    def all(self) -> list[Signal]:
        return [*list(self._first.values()), *[signal for _, signal in list(self._others)]]
