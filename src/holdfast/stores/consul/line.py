"""What a waiting claim knows of the entries in front of it. Pure.

Entries in front of a claim can only disappear, since the order is that of arrival. So a claim reads
the whole queue once, when it joins. Later it reads its own entry, the entry that it waits for, and
the first few of the queue, however many wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from holdfast.claim import Claim, Mode
from holdfast.core.ordered import Entry, absent_of

__all__ = ["Line", "QueuedEntry"]

FIRST = 4
"""How many entries from the front of the queue are read: a waiter that could enter, and whose
process is dead or stopped, is found there."""


class Line:
    """The keys of the entries in front of one claim."""

    __slots__ = ("ahead", "gone", "mode")

    def __init__(self, mode: Mode, ahead: Sequence[Entry]) -> None:
        """``ahead`` has all entries in front, in order."""
        if mode is Mode.SLOTS:  # what holds is known by the slots that are taken
            ahead = [entry for entry in ahead if not entry.details.settled]
        self.mode = mode
        self.ahead = tuple(entry.key for entry in ahead)
        """In order; some may be gone by now. For slots only claims that have none yet."""
        self.gone = ""
        """The key that a query did not find. A query may be answered from old data, so the
        transaction that enters checks it again."""

    @property
    def blocking(self) -> tuple[str, ...]:
        """The entries that must be gone, or have their slots, before the claim may enter."""
        if self.mode is Mode.SHARED:
            return tuple(filter(_is_writer, self.ahead))
        return self.ahead

    @property
    def watched(self) -> str:
        """The key of the entry to wait for; empty for none."""
        return (self.blocking or ("",))[-1]

    def to_read(self) -> list[str]:
        """The keys to read again."""
        watched = [self.watched] if self.watched else []
        return list(dict.fromkeys([*self.ahead[:FIRST], *watched]))

    def update(self, read: Collection[str], found: Sequence[Entry]) -> bool:
        """Drops entries that are out of the way: ``found`` are those of ``read`` that are still in
        front. False if more may be gone than were read: then the whole queue is to be read."""
        there = {entry.key for entry in found}
        ends = self.ahead[:1] + ((self.watched,) if self.watched else ())
        self.ahead = tuple(key for key in self.ahead if key in there or key not in read)
        self.gone = ""
        for entry in found:
            if entry.details.settled:
                self.entered(entry.key)
        return not self.blocking or not ends or any(key in there for key in ends)

    def entered(self, key: str) -> None:
        """Drops what is out of the way because the entry of this key has entered after a wait."""
        if key not in self.ahead:
            return
        index = self.ahead.index(key)
        if self.mode is Mode.SLOTS:  # others in front of it may have fitted beside it
            self.ahead = self.ahead[:index] + self.ahead[index + 1 :]
        elif _is_writer(key):
            self.ahead = self.ahead[index:]
        else:
            readers = tuple(key for key in self.ahead[:index] if not _is_writer(key))
            self.ahead = readers + self.ahead[index:]

    def absent(self, claim: Claim, found: Mapping[str, Entry], taken: int) -> Sequence[Entry]:
        """The first entries of the queue that could enter and have not. ``taken`` is the number of
        slots that are taken."""
        first = [found[key] for key in takewhile(found.__contains__, self.ahead)]
        if self.mode is not Mode.SLOTS:
            return absent_of(first)
        return [entry for entry in first[:1] if entry.details.weight <= claim.limit - taken]


def _is_writer(key: str) -> bool:
    return key.split("/")[-2] == "w"


class QueuedEntry(NamedTuple):
    """An entry of this client that waits."""

    order: int
    changed: int
    since: float
    behind: int
    line: Line
