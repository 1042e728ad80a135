"""The local line: of all who wait in one door for a name, only the first stands in the store's.

It is an optimisation, not a lock: the store decides. So it needs no mutex. Every step is one
atomic dict operation, done in an order in which nobody who waits is forgotten; a race at worst
lets two of one door stand in the store's line.
"""

from __future__ import annotations

from collections import OrderedDict

from holdfast.claim import Claim, Grant
from holdfast.core.contract import Runtime, Signal, Waiting

__all__ = ["Lines", "Turn"]


class Turn:
    """One acquire that waits or is about to ask."""

    __slots__ = ("answer", "claim", "gone", "line", "signal", "standing")

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.line: OrderedDict[Turn, None] | None = None
        self.signal: Signal | None = None
        self.standing = False
        """Whether it has a place in the store's line."""
        self.answer: tuple[Grant, float] | None = None
        """A grant that another thread's exchange brought, and when that was sent."""
        self.gone = False

    @property
    def first(self) -> bool:
        return self.line is not None and next(iter(self.line), None) is self

    def waiting(self) -> Waiting:
        """What the keeper refreshes."""
        return Waiting(self.claim, len(self.line) - 1 if self.line else 0)


class Lines:
    """The lines of one door, by name."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lines: dict[str, OrderedDict[Turn, None]] = {}

    def join(self, turn: Turn) -> bool:
        """Joins the name's line; answers whether it is the first."""
        name = turn.claim.name
        line = self._lines.get(name)
        if line is None:
            line = self._lines.setdefault(name, OrderedDict())
        else:
            turn.signal = self._runtime.signal()
        turn.line = line
        line[turn] = None
        if next(iter(line)) is turn:
            return True
        if turn.signal is None:  # somebody made the line in the same moment
            turn.signal = self._runtime.signal()
        return turn.first

    def leave(self, turn: Turn) -> None:
        """Leaves the line and lets the next one ask. May be called again."""
        turn.gone = True
        line = turn.line
        if line is None:
            return
        line.pop(turn, None)
        heir = next(iter(line), None)
        if heir is None:
            if self._lines.get(turn.claim.name) is line and not line:
                self._lines.pop(turn.claim.name, None)
        elif heir.signal is not None:
            heir.signal.set()

    def standing(self, name: str) -> Turn | None:
        """Who of this door stands first in the store's line."""
        line = self._lines.get(name)
        turn = next(iter(line), None) if line else None
        return turn if turn is not None and turn.standing else None

    def clear(self) -> None:
        """In a forked child: nobody here waits."""
        self._lines = {}

    def all(self) -> list[Turn]:
        """Everybody who waits in this door."""
        return [turn for line in list(self._lines.values()) for turn in list(line)]
