"""The queue of one name inside a transaction: holders, waiters, next grant.

The rules are those of ``stores.memory``, over rows. A queue may be long and every release reads
it, so SQLite counts and filters; only the rows that matter are fetched: the caller's own, those of
the holders, and the first waiters. ``row`` checks what is fetched. ``wakeups`` collects the waiters
to wake after the commit.

Stored names keep their spelling: ``claim.place`` is the order of arrival, ``name.crowd`` the number
of rows in ``claim``.
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

__all__ = ["NameQueue", "RequestContext", "Wakeup"]

FULL_QUEUE_RETRY_SECONDS = 1.0
ALONE = Share(Mode.EXCLUSIVE, 1)

_NAME = "SELECT token, owner, label, since, ends, crowd FROM name WHERE name = ?"
_SAVE = (
    "INSERT INTO name VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
    "token = excluded.token, owner = excluded.owner, label = excluded.label, "
    "since = excluded.since, ends = excluded.ends, crowd = excluded.crowd"
)
# Expired holds, waiters that were not refreshed, waiters that were woken and did not attempt.
_OVER = "DELETE FROM claim WHERE name = ? AND (ends <= ? OR (reserved > 0 AND reserved < ?))"
_MINE = "SELECT place, token, slots, reserved, address FROM claim WHERE name = ? AND owner = ?"
_HELD = "SELECT mode, weight, slots FROM claim WHERE name = ? AND token > 0"
# Everything about the other claims at once. The caller's order comes three times, then its owner.
_OTHERS = """SELECT
    count(*) FILTER (WHERE token > 0),
    count(*) FILTER (WHERE token = 0),
    count(*) FILTER (WHERE token = 0 AND place < ?),
    total(weight) FILTER (WHERE token = 0 AND place < ?),
    max(mode <> 'shared') FILTER (WHERE token = 0 AND place < ?),
    min(CASE WHEN token > 0 THEN ends WHEN reserved > 0 THEN reserved END),
    max(mode), max(capacity), max(place)
    FROM claim WHERE name = ? AND owner <> ?"""
_FIRST = (
    "SELECT place, owner, mode, weight, capacity, reserved, address FROM claim "
    "WHERE name = ? AND token = 0 ORDER BY place LIMIT ?"
)
_JOIN = "INSERT INTO claim VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, 0)"
_ADMIT = (
    "UPDATE claim SET token = ?, slots = ?, since = ?, ends = ?, reserved = 0, address = '' "
    "WHERE name = ? AND place = ?"
)
_HAND_OVER = (
    "UPDATE claim SET owner = ?, label = ?, token = ?, since = ?, ends = max(ends, ?) "
    "WHERE name = ? AND place = ?"
)
_KEEP = "UPDATE claim SET ends = ?, reserved = 0, address = ? WHERE name = ? AND place = ?"
_REFRESH = "UPDATE claim SET ends = ?, behind = ? WHERE name = ? AND place = ?"
_RESERVE = "UPDATE claim SET reserved = ? WHERE name = ? AND place = ?"
_EXTEND = "UPDATE claim SET ends = max(ends, ?) WHERE name = ? AND place = ?"
_LEAVE = "DELETE FROM claim WHERE name = ? AND place = ?"
_REVOKE = "DELETE FROM claim WHERE name = ? AND token > 0 RETURNING token"
_SKIP = "DELETE FROM claim WHERE name = ? AND token = 0 AND address = ?"

_Row = tuple[int, str, str, float, float, int]
_NOBODY: _Row = (0, "", "", 0.0, 0.0, 0)


class Wakeup(NamedTuple):
    """A waiter whose next attempt may succeed."""

    owner: str
    address: str


class RequestContext(NamedTuple):
    """When a transaction runs, and for which client."""

    now: float
    """The boot clock, which leases are measured by."""
    wall: float
    floor: int
    """The lowest token of this boot."""
    address: str
    """The caller's wake-up address; empty for none."""
    store: str


class OwnRow(NamedTuple):
    """The caller's row in ``claim``: a waiter, or a shared or slots hold."""

    order: int
    token: int
    slots: tuple[int, ...]
    reserved: float
    address: str


class Others(NamedTuple):
    """The sum of the other rows in ``claim``, without the caller's."""

    holders: int = 0
    waiters: int = 0
    ahead: int = 0
    ahead_weight: float = 0.0
    ahead_apart: int | None = None
    """Whether a waiter in front is not a reader."""
    soonest: float | None = None
    """When the first of their holds or reservations ends."""
    mode: str | None = None
    limit: int | None = None
    last: int | None = None

    @property
    def in_front(self) -> list[Share]:
        """All waiters in front, as one share of their total weight."""
        if not self.ahead:
            return []
        mode = Mode.EXCLUSIVE if self.ahead_apart else Mode.SHARED
        return [Share(mode, int(self.ahead_weight))]


def _name(row: tuple[Any, ...]) -> _Row:
    """A checked row of ``name``."""
    token, owner, label, since, ends, entries = row
    return (
        read.last_token(token),
        read.text(owner, "owner"),
        label if isinstance(label, str) else "",
        read.moment(since, "time of the last grant"),
        read.moment(ends, "end"),
        read.count(entries, "number of waiters"),
    )


def _own_row(row: tuple[Any, ...]) -> OwnRow:
    order, token, slots, reserved, address = row
    return OwnRow(
        read.order(order),
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
        read.order(others.last)
    return others


class QueuedWaiter(NamedTuple):
    """One of the first waiters."""

    order: int
    owner: str
    mode: Mode
    weight: int
    limit: int
    reserved: float
    address: str


def _queued_waiter(row: tuple[Any, ...]) -> QueuedWaiter:
    order, owner, mode, weight, limit, reserved, address = row
    return QueuedWaiter(
        read.order(order),
        read.text(owner, "owner"),
        read.mode(mode),
        read.count(weight, "weight"),
        read.count(limit, "limit"),
        read.moment(reserved, "reservation"),
        read.text(address, "address"),
    )


class NameQueue:
    """The holds and waiters of one name, inside a writing transaction."""

    def __init__(self, cursor: sqlite3.Cursor, name: str, context: RequestContext) -> None:
        self._cursor, self._name, self._context = cursor, name, context
        found = cursor.execute(_NAME, (name,)).fetchone()
        row = _NOBODY if found is None else _name(found)
        self.token, self.owner, self.label, self.since, self.ends, self.entries = row
        self._changed = self._reserved = False
        self.wakeups: list[Wakeup] = []
        if self.owner and self.ends <= context.now:
            self._vacate()
        if self.entries:
            self._deleted(cursor.execute(_OVER, (name, context.now, context.now)).rowcount)

    def _vacate(self) -> None:
        self.owner, self.ends, self._changed = "", 0.0, True

    def _deleted(self, count: int) -> None:
        if count:
            self.entries -= count
            self._changed = True

    def _remove(self, own: OwnRow) -> None:
        self._deleted(self._cursor.execute(_LEAVE, (self._name, own.order)).rowcount)

    def _find(self, owner: str) -> OwnRow | None:
        if not self.entries:
            return None
        row = self._cursor.execute(_MINE, (self._name, owner)).fetchone()
        return None if row is None else _own_row(row)

    def _held(self) -> list[Share]:
        """The shares of all holds."""
        if self.owner:
            return [ALONE]
        if not self.entries:
            return []
        rows = self._cursor.execute(_HELD, (self._name,)).fetchall()
        return [
            Share(read.mode(mode), read.count(weight, "weight"), read.slots(slots))
            for mode, weight, slots in rows
        ]

    def _others(self, owner: str, own: OwnRow | None) -> Others:
        if self.entries == (own is not None):
            return Others()
        order = read.LAST_ORDER if own is None else own.order
        row = (order, order, order, self._name, owner)
        return _others(self._cursor.execute(_OTHERS, row).fetchone())

    def attempt(self, claim: Claim, join: bool) -> Grant | Busy:
        """Grants the claim if it fits with all holds and waiters in front; else adds it to the
        queue, if ``join``."""
        own = self._find(claim.owner)
        if self.owner == claim.owner or (own is not None and own.token):
            return self._again(claim, own)
        others = self._others(claim.owner, own)
        self._check_limit(claim, others)
        held = self._held() if self.owner or others.holders else []
        if admit.fits(claim.mode, claim.weight, claim.limit, held + others.in_front):
            return self._grant(claim, own, held, others)
        return self._busy(claim, own, others, join)

    def _again(self, claim: Claim, own: OwnRow | None) -> Grant:
        """For a retry whose first answer was lost: the same grant, renewed by its ttl. A late
        retry may run after a renewal with a later end: the later end stays."""
        ends = self._context.now + claim.ttl
        if own is None:
            self.ends, self._changed = max(self.ends, ends), True
            return Grant(claim, self.token)
        self._cursor.execute(_EXTEND, (ends, self._name, own.order))
        return Grant(claim, own.token, own.slots)

    def _check_limit(self, claim: Claim, others: Others) -> None:
        if self.owner:
            admit.check_limit(claim, 0, slots=False, store=self._context.store)
        elif others.mode is not None:  # all of them have the same kind and limit
            slots = others.mode == Mode.SLOTS.value
            admit.check_limit(claim, others.limit or 0, slots=slots, store=self._context.store)

    def _grant(self, claim: Claim, own: OwnRow | None, held: list[Share], others: Others) -> Grant:
        self._next_token()
        ends = self._context.now + claim.ttl
        if claim.mode is Mode.EXCLUSIVE:
            if own is not None:
                self._remove(own)
            self.owner, self.label, self.ends = claim.owner, claim.label, ends
            return Grant(claim, self.token)
        slots: tuple[int, ...] = ()
        if claim.mode is Mode.SLOTS:
            slots = admit.free_slots(claim.weight, claim.limit, held)
        text = ",".join(map(str, slots))
        if own is None:
            self._append(claim, self.token, text, ends, others)
        else:
            row = (self.token, text, self.since, ends, self._name, own.order)
            self._cursor.execute(_ADMIT, row)
        return Grant(claim, self.token, slots)

    def _next_token(self) -> None:
        context = self._context
        self.token = max(self.token + 1, int(context.wall * 1_000_000), context.floor)
        self.since, self._changed = context.wall, True

    def _append(self, claim: Claim, token: int, slots: str, ends: float, others: Others) -> None:
        order = (others.last or 0) + 1
        self._cursor.execute(
            _JOIN,
            (
                self._name, order, claim.owner, claim.mode.value, claim.weight, claim.limit,
                token, slots, claim.label, self._context.wall, ends, self._context.address,
            ),
        )  # fmt: skip
        self.entries += 1
        self._changed = True

    def _busy(self, claim: Claim, own: OwnRow | None, others: Others, join: bool) -> Busy:
        now = self._context.now
        if own is not None:
            row = (now + STALE_SECONDS, self._context.address, self._name, own.order)
            self._cursor.execute(_KEEP, row)
        elif join:
            if others.waiters >= QUEUE_CAP:
                full = f"{QUEUE_CAP} already wait for {claim.name!r}"
                return Busy(others.ahead, FULL_QUEUE_RETRY_SECONDS, reason=full)
            self._append(claim, 0, "", now + STALE_SECONDS, others)
        soonest = self.ends if self.owner else others.soonest
        self._reserve()
        if self.wakeups and (soonest is None or soonest > now + GRACE_SECONDS):
            soonest = now + GRACE_SECONDS  # the waiters just woken may not attempt
        return Busy(others.ahead, None if soonest is None else max(0.0, soonest - now))

    def take_over(self, owner: str, token: int, claim: Claim) -> Grant | None:
        """Gives the hold with this owner and token to the owner of ``claim``, with a new token.
        ``None`` if there is no such hold."""
        own = self._find(claim.owner)
        if self.owner == claim.owner or (own is not None and own.token):
            return self._again(claim, own)
        ends = self._context.now + claim.ttl
        if self.owner == owner and self.token == token:
            self._next_token()
            self.owner, self.label, self.ends = claim.owner, claim.label, max(self.ends, ends)
            return Grant(claim, self.token)
        old = self._find(owner)
        if old is None or old.token != token:
            return None
        self._next_token()
        row = (claim.owner, claim.label, self.token, self.since, ends, self._name, old.order)
        self._cursor.execute(_HAND_OVER, row)
        return Grant(claim, self.token, old.slots)

    def release(self, owner: str) -> bool:
        """Ends the owner's hold. True if it had one."""
        if self.owner == owner:
            self._vacate()
            return True
        own = self._find(owner)
        if own is None or not own.token:
            return False
        self._remove(own)
        return True

    def abandon(self, owner: str) -> None:
        """Removes the owner's hold or entry."""
        if self.owner == owner:
            self._vacate()
        elif (own := self._find(owner)) is not None:
            self._remove(own)

    def clear(self) -> list[int]:
        """Ends all holds. Returns their tokens."""
        tokens = [self.token] if self.owner else []
        if self.owner:
            self._vacate()
        elif self.entries:
            ended = self._cursor.execute(_REVOKE, (self._name,)).fetchall()
            self._deleted(len(ended))
            tokens += [read.token(token) for (token,) in ended]
        return tokens

    def refresh(self, owner: str, behind: int) -> bool:
        """Keeps a waiter's entry for another ``STALE_SECONDS``. False if it has none any more."""
        own = self._find(owner)
        if own is None or own.token:
            return False
        until = self._context.now + STALE_SECONDS
        self._cursor.execute(_REFRESH, (until, behind, self._name, own.order))
        if own.reserved:  # its first wake-up may have been lost
            self.wakeups.append(Wakeup(owner, own.address))
        return True

    def skip(self, addresses: set[str]) -> None:
        """Removes the waiters of dead clients from the queue."""
        for address in addresses:
            self._deleted(self._cursor.execute(_SKIP, (self._name, address)).rowcount)

    def write_back(self) -> None:
        """Reserves the name for the first waiters that fit now, and writes back all changes."""
        self._reserve()
        if self._changed:
            row = (self.token, self.owner, self.label, self.since, self.ends, self.entries)
            self._cursor.execute(_SAVE, (self._name, *row))

    def _reserve(self) -> None:
        if self.owner or not self.entries or self._reserved:
            return
        self._reserved = True
        first = self._first_waiters(1)
        if first and first[0].mode is not Mode.EXCLUSIVE:
            first = self._first_waiters(QUEUE_CAP)
        taken = self._held() if first else []
        for waiter in first:
            if not admit.fits(waiter.mode, waiter.weight, waiter.limit, taken):
                return
            if not waiter.reserved:
                until = self._context.now + GRACE_SECONDS
                self._cursor.execute(_RESERVE, (until, self._name, waiter.order))
                self.wakeups.append(Wakeup(waiter.owner, waiter.address))
            taken.append(Share(waiter.mode, waiter.weight))

    def _first_waiters(self, most: int) -> list[QueuedWaiter]:
        return list(
            map(_queued_waiter, self._cursor.execute(_FIRST, (self._name, most)).fetchall())
        )
