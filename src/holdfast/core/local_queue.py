"""The local line: of all who wait in one client for a name, only the first stands in the store's.

It is an optimisation, not a lock: the store decides. So it needs no mutex. Every step is one
atomic dict operation, done in an order in which nobody who waits is forgotten; a race at worst
lets two of one client stand in the store's line.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from weakref import ref

from holdfast.claim import Claim, Grant
from holdfast.core.contract import Runtime, Signal, Waiting

__all__ = ["Lines", "Turn"]


class Turn:
    """One acquire that waits or is about to ask."""

    __slots__ = (
        "__weakref__",
        "answer",
        "claim",
        "gone",
        "key",
        "line",
        "served",
        "signal",
        "standing",
        "unsure",
    )

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.line: Line | None = None
        self.key: ref[Turn] | None = None
        self.signal: Signal | None = None
        self.standing = False
        """Whether it has a place in the store's line."""
        self.unsure = False
        """Whether a request of it went without an answer, and may still land."""
        self.answer: tuple[Grant, float] | None = None
        """A grant that another thread's exchange or a wake-up brought, and when its certain time
        began."""
        self.gone = False
        self.served = False
        """Whether it left with a hold."""

    @property
    def first(self) -> bool:
        return self.line is not None and _first(self.line) is self

    def waiting(self) -> Waiting:
        """What the renewer refreshes."""
        return Waiting(self.claim, len(self.line) - 1 if self.line else 0)


# Weak: an interrupt may tear an acquire apart before it can leave. Who is gone is not first.
Line = OrderedDict[ref[Turn], None]


def _first(line: Line) -> Turn | None:
    while line:
        try:
            key = next(iter(line))
        except (RuntimeError, StopIteration):
            continue  # another thread joined or left between the two steps of this look
        turn = key()
        if turn is not None and not turn.gone:
            return turn
        line.pop(key, None)
    return None


class Lines:
    """The lines of one client, by name."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lines: dict[str, Line] = {}

    def join(self, turn: Turn) -> bool:
        """Joins the name's line; answers whether it is the first."""
        name = turn.claim.name
        line = self._lines.get(name)
        if line is None:
            line = self._lines.setdefault(name, OrderedDict())
        if line:
            turn.signal = self._runtime.signal()
        turn.line = line
        turn.key = ref(turn, partial(self._collected, line))
        line[turn.key] = None
        if len(line) == 1:
            return True
        if turn.signal is None:  # somebody joined in the same moment
            turn.signal = self._runtime.signal()
        return turn.first

    def leave(self, turn: Turn) -> None:
        """Leaves the line and lets the next one ask. May be called again."""
        turn.gone = True
        line, key = turn.line, turn.key
        if line is None or key is None:
            return
        line.pop(key, None)
        if line:
            self._call_first(line)
        elif self._lines.get(turn.claim.name) is line:
            self._lines.pop(turn.claim.name, None)
        turn.key = None  # at the end: who is interrupted here leaves again

    def _call_first(self, line: Line) -> None:
        heir = _first(line)
        if heir is not None and heir.signal is not None:
            heir.signal.set()

    def _collected(self, line: Line, key: ref[Turn]) -> None:
        """In a destructor: an acquire ended without leaving."""
        if key in line:
            line.pop(key, None)
            self._call_first(line)

    def standing(self, name: str) -> Turn | None:
        """Who of this client stands first in the store's line."""
        if not self._lines:
            return None
        line = self._lines.get(name)
        turn = _first(line) if line else None
        return turn if turn is not None and turn.standing else None

    def clear(self) -> None:
        """In a forked child: nobody here waits."""
        self._lines = {}

    def all(self) -> list[Turn]:
        """Everybody who waits in this client."""
        turns = (key() for line in list(self._lines.values()) for key in list(line))
        return [turn for turn in turns if turn is not None]
