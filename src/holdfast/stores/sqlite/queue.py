"""One name inside a transaction: who holds it, who waits, and what follows from that.

The rules are ``backends.memory``'s over rows. A line may be long and every release reads it, so
SQLite counts and skips; only the rows that matter are fetched: the asker's own, those of the
holders, and the first in line. What is fetched is checked by ``sqlite_row``. Whom to wake is
noted in ``wakes``, for after the commit.
"""

from __future__ import annotations

import sqlite3
from math import isfinite
from typing import Any, NamedTuple

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core import admit
from holdfast.core.admit import Share
from holdfast.core.contract import GRACE_SECONDS, QUEUE_CAP, STALE_SECONDS
from holdfast.stores.sqlite import row as read

__all__ = ["Line", "Moment", "Wake"]

ALONE = Share(Mode.EXCLUSIVE, 1)

_NAME = "SELECT token, owner, label, since, ends, crowd FROM name WHERE name = ?"
_SAVE = (
    "INSERT INTO name VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (name) DO UPDATE SET "
    "token = ?2, owner = ?3, label = ?4, since = ?5, ends = ?6, crowd = ?7"
)
# Holds that ran out, waiters that were not refreshed, waiters that were woken and did not come.
_OVER = "DELETE FROM claim WHERE name = ?1 AND (ends <= ?2 OR (reserved > 0 AND reserved < ?2))"
_MINE = "SELECT place, token, slots, reserved, address FROM claim WHERE name = ? AND owner = ?"
_HELD = "SELECT mode, weight, slots FROM claim WHERE name = ? AND token > 0"
# All about the others at once: ?2 is the asker's owner, ?3 its place.
_OTHERS = """SELECT
    count(*) FILTER (WHERE token > 0),
    count(*) FILTER (WHERE token = 0),
    count(*) FILTER (WHERE token = 0 AND place < ?3),
    total(weight) FILTER (WHERE token = 0 AND place < ?3),
    max(mode <> 'shared') FILTER (WHERE token = 0 AND place < ?3),
    min(CASE WHEN token > 0 THEN ends WHEN reserved > 0 THEN reserved END),
    max(mode), max(capacity), max(place)
    FROM claim WHERE name = ?1 AND owner <> ?2"""
_FIRST = (
    "SELECT place, owner, mode, weight, capacity, reserved, address FROM claim "
    "WHERE name = ? AND token = 0 ORDER BY place LIMIT ?"
)
_JOIN = "INSERT INTO claim VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, 0)"
_ADMIT = (
    "UPDATE claim SET token = ?, slots = ?, since = ?, ends = ?, reserved = 0, address = '' "
    "WHERE name = ? AND place = ?"
)
_STAND = "UPDATE claim SET ends = ?, reserved = 0, address = ? WHERE name = ? AND place = ?"
_REFRESH = "UPDATE claim SET ends = ?, behind = ? WHERE name = ? AND place = ?"
_RESERVE = "UPDATE claim SET reserved = ? WHERE name = ? AND place = ?"
_EXTEND = "UPDATE claim SET ends = max(ends, ?) WHERE name = ? AND place = ?"
_LEAVE = "DELETE FROM claim WHERE name = ? AND place = ?"
_REVOKE = "DELETE FROM claim WHERE name = ? AND token > 0 RETURNING token"
_SKIP = "DELETE FROM claim WHERE name = ? AND token = 0 AND address = ?"

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


class Mine(NamedTuple):
    """The asker's own row: a place in the line, or a hold that is not alone."""

    place: int
    token: int
    slots: tuple[int, ...]
    reserved: float
    address: str


class Others(NamedTuple):
    """What the line and the shared holds of a name come to, without the asker."""

    holders: int = 0
    waiters: int = 0
    ahead: int = 0
    ahead_weight: float = 0.0
    ahead_apart: int | None = None
    """Whether anybody in front would not share."""
    soonest: float | None = None
    """When the first of their holds or reservations ends."""
    mode: str | None = None
    limit: int | None = None
    last: int | None = None

    @property
    def in_front(self) -> list[Share]:
        """Those in front, as one who wants what all of them want."""
        if not self.ahead:
            return []
        mode = Mode.EXCLUSIVE if self.ahead_apart else Mode.SHARED
        return [Share(mode, int(self.ahead_weight))]


def _name(row: tuple[Any, ...]) -> _Row:
    """A row of ``name`` that can be relied on."""
    token, owner, label, since, ends, crowd = row
    return (
        read.last_token(token),
        read.text(owner, "owner"),
        label if isinstance(label, str) else "",
        read.moment(since, "time of the last grant"),
        read.moment(ends, "end"),
        read.count(crowd, "number of waiters"),
    )


def _mine(row: tuple[Any, ...]) -> Mine:
    place, token, slots, reserved, address = row
    return Mine(
        read.place(place),
        read.last_token(token),
        read.slots(slots),
        read.moment(reserved, "reservation"),
        read.text(address, "address"),
    )


def _others(row: tuple[Any, ...]) -> Others:
    others = Others._make(row)
    read.count(int(others.ahead_weight) if isfinite(others.ahead_weight) else -1, "weight")
    if others.soonest is not None:
        read.moment(others.soonest, "end")
    if others.mode is not None:
        read.mode(others.mode)
        read.count(others.limit, "limit")
        read.place(others.last)
    return others


class First(NamedTuple):
    """One of the first in line."""

    place: int
    owner: str
    mode: Mode
    weight: int
    limit: int
    reserved: float
    address: str


def _first(row: tuple[Any, ...]) -> First:
    place, owner, mode, weight, limit, reserved, address = row
    return First(
        read.place(place),
        read.text(owner, "owner"),
        read.mode(mode),
        read.count(weight, "weight"),
        read.count(limit, "limit"),
        read.moment(reserved, "reservation"),
        read.text(address, "address"),
    )


class Line:
    """A name's state, inside a writing transaction."""

    def __init__(self, cursor: sqlite3.Cursor, name: str, moment: Moment) -> None:
        self._cursor, self._name, self._moment = cursor, name, moment
        found = cursor.execute(_NAME, (name,)).fetchone()
        row = _NOBODY if found is None else _name(found)
        self.token, self.owner, self.label, self.since, self.ends, self.crowd = row
        self._changed = self._reserved = False
        self.wakes: list[Wake] = []
        if self.owner and self.ends <= moment.now:
            self._vacate()
        if self.crowd:
            self._leave(cursor.execute(_OVER, (name, moment.now)).rowcount)

    def _vacate(self) -> None:
        self.owner, self.ends, self._changed = "", 0.0, True

    def _leave(self, count: int) -> None:
        if count:
            self.crowd -= count
            self._changed = True

    def _remove(self, mine: Mine) -> None:
        self._leave(self._cursor.execute(_LEAVE, (self._name, mine.place)).rowcount)

    def _find(self, owner: str) -> Mine | None:
        if not self.crowd:
            return None
        row = self._cursor.execute(_MINE, (self._name, owner)).fetchone()
        return None if row is None else _mine(row)

    def _held(self) -> list[Share]:
        """What is held."""
        if self.owner:
            return [ALONE]
        if not self.crowd:
            return []
        rows = self._cursor.execute(_HELD, (self._name,)).fetchall()
        return [
            Share(read.mode(mode), read.count(weight, "weight"), read.slots(slots))
            for mode, weight, slots in rows
        ]

    def _others(self, owner: str, mine: Mine | None) -> Others:
        if self.crowd == (mine is not None):
            return Others()
        place = read.LAST_PLACE if mine is None else mine.place
        return _others(self._cursor.execute(_OTHERS, (self._name, owner, place)).fetchone())

    def attempt(self, claim: Claim, join: bool) -> Grant | Busy:
        """Admits the claim if it fits behind those in front of it; else lines it up."""
        mine = self._find(claim.owner)
        if self.owner == claim.owner or (mine is not None and mine.token):
            return self._again(claim, mine)
        others = self._others(claim.owner, mine)
        self._check_limit(claim, others)
        held = self._held() if self.owner or others.holders else []
        if admit.fits(claim.mode, claim.weight, claim.limit, held + others.in_front):
            return self._grant(claim, mine, held, others)
        return self._busy(claim, mine, others, join)

    def _again(self, claim: Claim, mine: Mine | None) -> Grant:
        """A retry whose first answer was lost: the same grant, its ttl renewed. It may arrive late,
        after others that set a later end: that stays."""
        ends = self._moment.now + claim.ttl
        if mine is None:
            self.ends, self._changed = max(self.ends, ends), True
            return Grant(claim, self.token)
        self._cursor.execute(_EXTEND, (ends, self._name, mine.place))
        return Grant(claim, mine.token, mine.slots)

    def _check_limit(self, claim: Claim, others: Others) -> None:
        if self.owner:
            admit.check_limit(claim, 0, slots=False, store=self._moment.store)
        elif others.mode is not None:  # all of them are of one kind and have one limit
            slots = others.mode == Mode.SLOTS.value
            admit.check_limit(claim, others.limit or 0, slots=slots, store=self._moment.store)

    def _grant(self, claim: Claim, mine: Mine | None, held: list[Share], others: Others) -> Grant:
        moment = self._moment
        self.token = max(self.token + 1, int(moment.wall * 1_000_000), moment.floor)
        self.since, self._changed = moment.wall, True
        ends = moment.now + claim.ttl
        if claim.mode is Mode.EXCLUSIVE:
            if mine is not None:
                self._remove(mine)
            self.owner, self.label, self.ends = claim.owner, claim.label, ends
            return Grant(claim, self.token)
        slots: tuple[int, ...] = ()
        if claim.mode is Mode.SLOTS:
            slots = admit.free_slots(claim.weight, claim.limit, held)
        text = ",".join(map(str, slots))
        if mine is None:
            self._append(claim, self.token, text, ends, others)
        else:
            row = (self.token, text, moment.wall, ends, self._name, mine.place)
            self._cursor.execute(_ADMIT, row)
        return Grant(claim, self.token, slots)

    def _append(self, claim: Claim, token: int, slots: str, ends: float, others: Others) -> None:
        place = (others.last or 0) + 1
        self._cursor.execute(
            _JOIN,
            (
                self._name, place, claim.owner, claim.mode.value, claim.weight, claim.limit,
                token, slots, claim.label, self._moment.wall, ends, self._moment.address,
            ),
        )  # fmt: skip
        self.crowd += 1
        self._changed = True

    def _busy(self, claim: Claim, mine: Mine | None, others: Others, join: bool) -> Busy:
        now = self._moment.now
        if mine is not None:
            row = (now + STALE_SECONDS, self._moment.address, self._name, mine.place)
            self._cursor.execute(_STAND, row)
        elif join:
            if others.waiters >= QUEUE_CAP:
                full = f"{QUEUE_CAP} already wait for {claim.name!r}"
                return Busy(others.ahead, 1.0, reason=full)
            self._append(claim, 0, "", now + STALE_SECONDS, others)
        soonest = self.ends if self.owner else others.soonest
        self._reserve()
        if self.wakes and (soonest is None or soonest > now + GRACE_SECONDS):
            soonest = now + GRACE_SECONDS  # those just woken may not come
        return Busy(others.ahead, None if soonest is None else max(0.0, soonest - now))

    def release(self, owner: str) -> bool:
        """Ends the owner's hold; whether it had one."""
        if self.owner == owner:
            self._vacate()
            return True
        mine = self._find(owner)
        if mine is None or not mine.token:
            return False
        self._remove(mine)
        return True

    def abandon(self, owner: str) -> None:
        """Leaves no trace of the owner."""
        if self.owner == owner:
            self._vacate()
        elif (mine := self._find(owner)) is not None:
            self._remove(mine)

    def clear(self) -> list[int]:
        """Ends all holds; answers their tokens."""
        tokens = [self.token] if self.owner else []
        if self.owner:
            self._vacate()
        elif self.crowd:
            ended = self._cursor.execute(_REVOKE, (self._name,)).fetchall()
            self._leave(len(ended))
            tokens += [read.token(token) for (token,) in ended]
        return tokens

    def refresh(self, owner: str, behind: int) -> bool:
        """Keeps a waiter's place for another while; whether it still had one."""
        mine = self._find(owner)
        if mine is None or mine.token:
            return False
        until = self._moment.now + STALE_SECONDS
        self._cursor.execute(_REFRESH, (until, behind, self._name, mine.place))
        if mine.reserved:  # its first wake-up may have been lost
            self.wakes.append(Wake(owner, mine.address))
        return True

    def skip(self, addresses: set[str]) -> None:
        """Takes those out of the line whose clients are dead."""
        for address in addresses:
            self._leave(self._cursor.execute(_SKIP, (self._name, address)).rowcount)

    def settle(self) -> None:
        """Reserves the name for those who now fit, and writes back what has changed."""
        self._reserve()
        if self._changed:
            row = (self.token, self.owner, self.label, self.since, self.ends, self.crowd)
            self._cursor.execute(_SAVE, (self._name, *row))

    def _reserve(self) -> None:
        if self.owner or not self.crowd or self._reserved:
            return
        self._reserved = True
        first = self._in_line(1)
        if first and first[0].mode is not Mode.EXCLUSIVE:
            first = self._in_line(QUEUE_CAP)
        taken = self._held() if first else []
        for waiter in first:
            if not admit.fits(waiter.mode, waiter.weight, waiter.limit, taken):
                return
            if not waiter.reserved:
                until = self._moment.now + GRACE_SECONDS
                self._cursor.execute(_RESERVE, (until, self._name, waiter.place))
                self.wakes.append(Wake(waiter.owner, waiter.address))
            taken.append(Share(waiter.mode, waiter.weight))

    def _in_line(self, most: int) -> list[First]:
        return list(map(_first, self._cursor.execute(_FIRST, (self._name, most)).fetchall()))
