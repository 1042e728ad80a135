"""One name inside a transaction: who holds it, who waits, and what follows from that.

The rules are ``backends.memory``'s over rows: everything is read once, decided on values, and
what has changed is written back by ``settle``. Whom to wake is noted in ``wakes``, for after the
commit.
"""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core import admit
from holdfast.core.admit import Share
from holdfast.core.contract import GRACE_SECONDS, QUEUE_CAP, STALE_SECONDS

__all__ = ["MODES", "Entry", "Line", "Moment", "Wake", "read_slots"]

MODES: dict[str, Mode] = {mode.value: mode for mode in Mode}

_NAME = "SELECT token, owner, label, since, ends, crowd FROM name WHERE name = ?"
_CROWD = (
    "SELECT place, owner, mode, weight, capacity, token, slots, ends, reserved, address "
    "FROM claim WHERE name = ? ORDER BY place"
)
_SAVE = (
    "INSERT INTO name VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (name) DO UPDATE SET "
    "token = ?2, owner = ?3, label = ?4, since = ?5, ends = ?6, crowd = ?7"
)
_JOIN = "INSERT INTO claim VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)"
_ADMIT = (
    "UPDATE claim SET token = ?, slots = ?, since = ?, ends = ?, reserved = 0, address = '' "
    "WHERE name = ? AND place = ?"
)
_REFRESH = "UPDATE claim SET ends = ?, reserved = 0, address = ? WHERE name = ? AND place = ?"
_RESERVE = "UPDATE claim SET reserved = ? WHERE name = ? AND place = ?"
_EXTEND = "UPDATE claim SET ends = ? WHERE name = ? AND place = ?"
_LEAVE = "DELETE FROM claim WHERE name = ? AND place = ?"

_Row = tuple[int, str, str, float, float, int]
_NOBODY: _Row = (0, "", "", 0.0, 0.0, 0)


class Wake(NamedTuple):
    """Somebody to be told that another attempt is worth it."""

    owner: str
    address: str


class Moment(NamedTuple):
    """When and by whom a transaction is done."""

    now: float
    """The boot clock, which leases are measured by."""
    wall: float
    floor: int
    """No token of this boot is below it."""
    address: str
    """Where the caller can be woken."""
    store: str


class Entry(NamedTuple):
    """A row of ``claim``: a waiter, or a holder that is not alone."""

    place: int
    owner: str
    mode: str
    weight: int
    limit: int
    token: int
    slots: str
    ends: float
    reserved: float
    address: str

    @property
    def share(self) -> Share:
        return Share(MODES[self.mode], self.weight, read_slots(self.slots))

    def over(self, now: float) -> bool:
        """Whether its hold ran out or, of a waiter, whether it is to be skipped."""
        return self.ends <= now or 0 < self.reserved < now


def read_slots(text: str) -> tuple[int, ...]:
    """Slots as they are stored: numbers with commas."""
    return tuple(map(int, text.split(","))) if text else ()


class Line:
    """A name's state, inside a writing transaction."""

    def __init__(self, cursor: sqlite3.Cursor, name: str, moment: Moment) -> None:
        self._cursor, self._name, self._moment = cursor, name, moment
        self._now = moment.now
        row: _Row = cursor.execute(_NAME, (name,)).fetchone() or _NOBODY
        self.token, self.owner, self.label, self.since, self.ends, crowd = row
        self.entries: list[Entry] = []
        if crowd:
            self.entries = list(map(Entry._make, cursor.execute(_CROWD, (name,)).fetchall()))
        self._changed = False
        self.wakes: list[Wake] = []
        self._end_what_is_over()

    def _end_what_is_over(self) -> None:
        if self.owner and self.ends <= self._now:
            self._vacate()
        for entry in [entry for entry in self.entries if entry.over(self._now)]:
            self._remove(entry)

    def _vacate(self) -> None:
        self.owner, self.ends, self._changed = "", 0.0, True

    def _remove(self, entry: Entry) -> None:
        self._cursor.execute(_LEAVE, (self._name, entry.place))
        self.entries.remove(entry)
        self._changed = True

    def _replace(self, entry: Entry, changed: Entry) -> None:
        self.entries[self.entries.index(entry)] = changed

    def find(self, owner: str) -> Entry | None:
        """The entry of an owner."""
        return next((entry for entry in self.entries if entry.owner == owner), None)

    def taken(self) -> list[Share]:
        """What is held."""
        held = [entry.share for entry in self.entries if entry.token]
        return [Share(Mode.EXCLUSIVE, 1), *held] if self.owner else held

    def attempt(self, claim: Claim, join: bool) -> Grant | Busy:
        """Admits the claim if it fits behind those in front of it; else lines it up."""
        mine = self.find(claim.owner)
        if self.owner == claim.owner or (mine is not None and mine.token):
            return self._again(claim, mine)
        self._check_limit(claim)
        ahead = [entry.share for entry in self.entries if not entry.token and entry is not mine]
        if mine is not None:
            place = mine.place
            ahead = [e.share for e in self.entries if not e.token and e.place < place]
        if admit.fits(claim.mode, claim.weight, claim.limit, self.taken() + ahead):
            return self._grant(claim, mine)
        return self._busy(claim, mine, len(ahead), join)

    def _again(self, claim: Claim, mine: Entry | None) -> Grant:
        """A retry whose first answer was lost: the same grant, its ttl renewed."""
        ends = self._now + claim.ttl
        if mine is None:
            self.ends, self._changed = ends, True
            return Grant(claim, self.token)
        self._cursor.execute(_EXTEND, (ends, self._name, mine.place))
        return Grant(claim, mine.token, read_slots(mine.slots))

    def _check_limit(self, claim: Claim) -> None:
        if self.owner:
            admit.check_limit(claim, 0, slots=False, store=self._moment.store)
        other = next((entry for entry in self.entries if entry.owner != claim.owner), None)
        if other is not None:
            slots = other.mode == Mode.SLOTS.value
            admit.check_limit(claim, other.limit, slots=slots, store=self._moment.store)

    def _grant(self, claim: Claim, mine: Entry | None) -> Grant:
        wall = self._moment.wall
        self.token = max(self.token + 1, int(wall * 1_000_000), self._moment.floor)
        self.since, self._changed = wall, True
        ends = self._now + claim.ttl
        if claim.mode is Mode.EXCLUSIVE:
            if mine is not None:
                self._remove(mine)
            self.owner, self.label, self.ends = claim.owner, claim.label, ends
            return Grant(claim, self.token)
        slots: tuple[int, ...] = ()
        if claim.mode is Mode.SLOTS:
            slots = admit.free_slots(claim.weight, claim.limit, self.taken())
        text = ",".join(map(str, slots))
        if mine is None:
            self._append(claim, self.token, text, ends)
        else:
            self._cursor.execute(_ADMIT, (self.token, text, wall, ends, self._name, mine.place))
            held = mine._replace(token=self.token, slots=text, ends=ends, reserved=0.0)
            self._replace(mine, held)
        return Grant(claim, self.token, slots)

    def _append(self, claim: Claim, token: int, slots: str, ends: float) -> None:
        wall, address = self._moment.wall, self._moment.address
        place = self.entries[-1].place + 1 if self.entries else 1
        entry = Entry(
            place, claim.owner, claim.mode.value, claim.weight, claim.limit,
            token, slots, ends, 0.0, address,
        )  # fmt: skip
        self._cursor.execute(
            _JOIN,
            (
                self._name, place, claim.owner, claim.mode.value, claim.weight, claim.limit,
                token, slots, claim.label, wall, ends, 0.0, address,
            ),
        )  # fmt: skip
        self.entries.append(entry)
        self._changed = True

    def _busy(self, claim: Claim, mine: Entry | None, place: int, join: bool) -> Busy:
        stale, address = self._now + STALE_SECONDS, self._moment.address
        if mine is not None:
            self._cursor.execute(_REFRESH, (stale, address, self._name, mine.place))
            self._replace(mine, mine._replace(ends=stale, reserved=0.0, address=address))
        elif join:
            if sum(not entry.token for entry in self.entries) >= QUEUE_CAP:
                return Busy(place, 1.0, reason=f"{QUEUE_CAP} already wait for {claim.name!r}")
            self._append(claim, 0, "", stale)
        # The soonest end of a hold or a reservation; both are 0 where there is none.
        ends = [entry.ends if entry.token else entry.reserved for entry in self.entries]
        soonest = min(filter(None, [self.ends, *ends]), default=None)
        return Busy(place, None if soonest is None else max(0.0, soonest - self._now))

    def holds(self, owner: str) -> bool:
        """Whether the owner holds it now."""
        mine = self.find(owner)
        return self.owner == owner or (mine is not None and mine.token > 0)

    def release(self, owner: str) -> bool:
        """Ends the owner's hold; whether it had one."""
        if self.owner == owner:
            self._vacate()
            return True
        mine = self.find(owner)
        if mine is None or not mine.token:
            return False
        self._remove(mine)
        return True

    def abandon(self, owner: str) -> None:
        """Leaves no trace of the owner."""
        if not self.release(owner):
            mine = self.find(owner)
            if mine is not None:
                self._remove(mine)

    def clear(self) -> list[int]:
        """Ends all holds; answers their tokens."""
        tokens = [self.token] if self.owner else []
        if self.owner:
            self._vacate()
        for entry in [entry for entry in self.entries if entry.token]:
            tokens.append(entry.token)
            self._remove(entry)
        return tokens

    def refresh(self, owner: str, behind: int) -> bool:
        """Keeps a waiter's place for another while; whether it still had one."""
        mine = self.find(owner)
        if mine is None or mine.token:
            return False
        self._cursor.execute(
            "UPDATE claim SET ends = ?, behind = ? WHERE name = ? AND place = ?",
            (self._now + STALE_SECONDS, behind, self._name, mine.place),
        )
        if mine.reserved:  # its first wake-up may have been lost
            self.wakes.append(Wake(owner, mine.address))
        return True

    def skip(self, addresses: set[str]) -> None:
        """Takes those out of the line whose doors are dead."""
        for entry in [entry for entry in self.entries if not entry.token]:
            if entry.address in addresses:
                self._remove(entry)

    def settle(self) -> None:
        """Reserves the name for those who now fit, and writes back what has changed."""
        self._reserve()
        if self._changed:
            row = (self.token, self.owner, self.label, self.since, self.ends, len(self.entries))
            self._cursor.execute(_SAVE, (self._name, *row))

    def _reserve(self) -> None:
        waiting = [entry for entry in self.entries if not entry.token]
        if not waiting:
            return
        taken = self.taken()
        for entry in waiting:
            share = entry.share
            if not admit.fits(share.mode, share.weight, entry.limit, taken):
                return
            if not entry.reserved:
                until = self._now + GRACE_SECONDS
                self._cursor.execute(_RESERVE, (until, self._name, entry.place))
                self._replace(entry, entry._replace(reserved=until))
                self.wakes.append(Wake(entry.owner, entry.address))
            taken.append(share)
