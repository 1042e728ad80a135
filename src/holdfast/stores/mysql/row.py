"""The row of a name as values: its holders, its queue, and the rules of admission. No I/O.

The rules are those of ``stores.memory``. The backend reads a row, changes its state here, and
writes it back. An exclusive hold has columns of its own. Waiters, shared holders and slot holders
are entries in one text, one line each, in the stored column ``crowd``. SQL statements read and
write the first words of a line, too (``sql``). Times are the server's, in µs.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from holdfast.claim import (
    Busy,
    Claim,
    Grant,
    Holder,
    LockInfo,
    Mode,
    Record,
    Waiter,
    read_label,
)
from holdfast.core import admit
from holdfast.core.admit import Share
from holdfast.core.contract import GRACE_SECONDS, QUEUE_CAP, STALE_SECONDS
from holdfast.errors import Incompatible
from holdfast.stores.mysql.protocol import Row

__all__ = [
    "CALLED",
    "MICROS",
    "NONE",
    "RowEntry",
    "RowState",
    "RowWake",
    "empty_state",
    "parse_state",
    "read_record",
    "read_state",
]

MICROS = 1_000_000
NONE = "-"
"""An empty word of an entry, as it is stored."""
CALLED = "r"
"""Prefix of the end of a reservation, as it is stored. The word before it is the subscription, so
a subscription finds its called entries by searching for both words."""
_GRACE, _STALE = int(GRACE_SECONDS * MICROS), int(STALE_SECONDS * MICROS)
LARGEST_NUMBER = 2**63 - 1
COUNTS = LARGEST_NUMBER - 1
"""The largest token or version that can still be incremented."""
LARGEST_LIMIT = 2**31 - 1
MOST_SLOTS = 65536
_MODES: dict[str, Mode] = {mode.value: mode for mode in Mode}


class RowWake(NamedTuple):
    """A waiter to wake after the row is written."""

    subscription: str
    owner: str


class RowEntry:
    """A waiter, or a shared or slot holder (with a token)."""

    __slots__ = (
        "behind",
        "ends",
        "label",
        "limit",
        "mode",
        "owner",
        "reserved",
        "since",
        "slots",
        "subscription",
        "token",
        "weight",
    )  # fmt: skip

    def __init__(
        self,
        owner: str,
        mode: str,
        weight: int,
        limit: int,
        label: str,
        since: int,
        ends: int,
        token: int = 0,
        slots: list[int] | tuple[int, ...] = (),
        reserved: int = 0,
        subscription: str = "",
        behind: int = 0,
    ) -> None:
        self.owner, self.mode, self.weight, self.limit = owner, _MODES[mode], weight, limit
        self.label, self.since, self.ends, self.token = label, since, ends, token
        self.slots, self.reserved, self.subscription, self.behind = (
            tuple(slots),
            reserved,
            subscription,
            behind,
        )

    def text(self) -> str:
        """The stored line."""
        slots = ",".join(map(str, self.slots)) or NONE
        called = f"{CALLED}{self.reserved}" if self.reserved else NONE
        return (
            f"{self.owner} {self.mode.value} {self.token} {self.ends} {self.subscription or NONE} "
            f"{called} {self.since} {self.weight} {self.limit} {self.behind} {slots} "
            f"{json.dumps(self.label)}\n"
        )

    @property
    def share(self) -> Share:
        return Share(self.mode, self.weight, self.slots)

    def is_over(self, now: int, skew: int) -> bool:
        """True if the hold has expired by the clock of every node; for a waiter, if it was not
        refreshed in time or did not use its reservation."""
        if self.token:
            return self.ends <= now - skew
        return self.ends <= now or 0 < self.reserved < now


class RowState:
    """The state of a name at one moment of the server's clock."""

    __slots__ = (
        "changed", "ends", "entries", "label", "name", "now", "owner", "since", "skew", "store",
        "token", "version", "wakes",
    )  # fmt: skip

    def __init__(self, name: str, now: int, store: str) -> None:
        self.name, self.now, self.store = name, now, store
        self.version = self.token = self.since = self.ends = 0
        self.owner = self.label = ""
        self.skew = 0
        """How far the clock of the node that wrote the row may be behind ``now``, in µs."""
        self.entries: list[RowEntry] = []
        self.changed = False
        self.wakes: list[RowWake] = []
        """Waiters to wake after this state is written."""

    def drop_expired(self) -> None:
        """Ends expired holds and removes expired waiters."""
        if self.owner and self.ends <= self.now - self.skew:
            self._vacate()
        for entry in [entry for entry in self.entries if entry.is_over(self.now, self.skew)]:
            self._remove(entry)

    def _vacate(self) -> None:
        self.owner, self.ends, self.changed = "", 0, True

    def _remove(self, entry: RowEntry) -> None:
        self.entries.remove(entry)
        self.changed = True

    def find(self, owner: str) -> RowEntry | None:
        """Returns the entry of an owner, if there is one."""
        return next((entry for entry in self.entries if entry.owner == owner), None)

    def taken(self) -> list[Share]:
        """Returns the shares that are held."""
        held = [entry.share for entry in self.entries if entry.token]
        return [Share(Mode.EXCLUSIVE, 1), *held] if self.owner else held

    def attempt(self, claim: Claim, join: bool, subscription: str) -> Grant | Busy:
        """Grants the claim if it fits together with the holders and the waiters ahead of it.
        Otherwise appends it to the queue, if ``join``."""
        mine = self.find(claim.owner)
        if self.owner == claim.owner or (mine is not None and mine.token):
            return self._repeat_grant(claim, mine)
        self._check_limit(claim)
        ahead: list[Share] = []
        for entry in self.entries:
            if entry is mine:
                break
            if not entry.token:
                ahead.append(entry.share)
        if admit.fits(claim.mode, claim.weight, claim.limit, self.taken() + ahead):
            return self._grant(claim, mine)
        return self._busy(claim, mine, len(ahead), join, subscription)

    def _repeat_grant(self, claim: Claim, mine: RowEntry | None) -> Grant:
        """Returns the existing grant with its ttl renewed, for a retry whose reply was lost."""
        self.extend(claim.owner, claim.ttl)
        if mine is None:
            return Grant(claim, self.token)
        return Grant(claim, mine.token, mine.slots)

    def _check_limit(self, claim: Claim) -> None:
        if self.owner:
            admit.check_limit(claim, 0, slots=False, store=self.store)
        other = next((entry for entry in self.entries if entry.owner != claim.owner), None)
        if other is not None:
            slots = other.mode is Mode.SLOTS
            admit.check_limit(claim, other.limit, slots=slots, store=self.store)

    def _grant(self, claim: Claim, mine: RowEntry | None) -> Grant:
        self.token = max(self.token + 1, self.now)
        ends = self.now + int(claim.ttl * MICROS)
        slots: tuple[int, ...] = ()
        if claim.mode is Mode.SLOTS:
            slots = admit.free_slots(claim.weight, claim.limit, self.taken())
        if mine is not None:
            self._remove(mine)
        self.changed = True
        if claim.mode is Mode.EXCLUSIVE:
            self.owner, self.label, self.since, self.ends = claim.owner, claim.label, self.now, ends
        else:
            held = sum(entry.token > 0 for entry in self.entries)  # holders come before waiters
            self.entries.insert(held, self._entry(claim, ends, token=self.token, slots=slots))
        return Grant(claim, self.token, slots)

    def _entry(self, claim: Claim, ends: int, **more: Any) -> RowEntry:
        return RowEntry(
            claim.owner, claim.mode.value, claim.weight, claim.limit, claim.label, self.now, ends,
            **more,
        )  # fmt: skip

    def _busy(
        self, claim: Claim, mine: RowEntry | None, place: int, join: bool, subscription: str
    ) -> Busy:
        stale = self.now + _STALE
        if mine is not None:
            mine.ends, mine.reserved, mine.subscription, self.changed = stale, 0, subscription, True
        elif join:
            if sum(not entry.token for entry in self.entries) >= QUEUE_CAP:
                return Busy(
                    place, 1.0, subscription, f"{QUEUE_CAP} already wait for {claim.name!r}"
                )
            self.entries.append(self._entry(claim, stale, subscription=subscription))
            self.changed = True
        return Busy(place, self._soonest(), ref=subscription)

    def _soonest(self) -> float | None:
        """Seconds until the first hold or reservation ends; None if there is none (both are then
        stored as 0)."""
        ends = [entry.ends if entry.token else entry.reserved for entry in self.entries]
        soonest = min(filter(None, [self.ends, *ends]), default=None)
        return None if soonest is None else max(0, soonest + self.skew - self.now) / MICROS

    def holds(self, owner: str) -> bool:
        """True if the owner holds the name."""
        mine = self.find(owner)
        return self.owner == owner or (mine is not None and mine.token > 0)

    def extend(self, owner: str, ttl: float, *, shorten: bool = False) -> bool:
        """Renews the owner's hold. Returns False if there is none. A later end stays, unless
        ``shorten``: requests may arrive out of order."""
        ends = self.now + int(ttl * MICROS)
        mine = self.find(owner)
        if self.owner == owner:
            self.ends, self.changed = ends if shorten else max(self.ends, ends), True
        elif mine is not None and mine.token:
            mine.ends, self.changed = ends if shorten else max(mine.ends, ends), True
        else:
            return False
        return True

    def release(self, owner: str) -> bool:
        """Ends the owner's hold. Returns False if there is none."""
        if self.owner == owner:
            self._vacate()
            return True
        mine = self.find(owner)
        if mine is None or not mine.token:
            return False
        self._remove(mine)
        return True

    def abandon(self, owner: str) -> None:
        """Removes the owner's hold or waiting entry."""
        if not self.release(owner) and (mine := self.find(owner)) is not None:
            self._remove(mine)

    def clear(self) -> list[int]:
        """Ends all holds. Returns their tokens."""
        tokens = [self.token] if self.owner else []
        if self.owner:
            self._vacate()
        for entry in [entry for entry in self.entries if entry.token]:
            tokens.append(entry.token)
            self._remove(entry)
        return tokens

    def refresh(self, owner: str, behind: int) -> bool:
        """Keeps a waiter in the queue for another ``STALE_SECONDS``. Returns False if it is no
        longer there. ``behind`` is how many waiters of its client are behind it."""
        mine = self.find(owner)
        if mine is None or mine.token:
            return False
        mine.ends, mine.behind, self.changed = self.now + _STALE, behind, True
        return True

    def skip(self, subscriptions: set[str]) -> None:
        """Removes the waiters of subscriptions that have ended."""
        for entry in [e for e in self.entries if not e.token and e.subscription in subscriptions]:
            self._remove(entry)

    def reserve(self, caller: str = "") -> None:
        """Reserves the name for the first waiters that fit now, and adds them to ``wakes``.
        ``caller`` is the owner whose request this is: it needs no wake-up."""
        taken: list[Share] | None = None
        for entry in self.entries:
            if entry.token:
                continue
            taken = self.taken() if taken is None else taken
            share = entry.share
            if not admit.fits(share.mode, share.weight, entry.limit, taken):
                return
            if not entry.reserved:
                entry.reserved, self.changed = self.now + _GRACE, True
                if entry.subscription and entry.owner != caller:
                    self.wakes.append(RowWake(entry.subscription, entry.owner))
            taken.append(share)

    def entries_text(self) -> bytes:
        """All entries as they are stored; empty if there are none."""
        return "".join([entry.text() for entry in self.entries]).encode()

    def info(self) -> LockInfo:
        """Holders and waiters, for ``inspect`` and ``list``."""
        holders = [
            Holder(
                *read_label(e.label), e.mode, e.token, e.slots, e.since / MICROS,
                max(0, e.ends - self.now) / MICROS,
            )
            for e in self.entries if e.token
        ]  # fmt: skip
        if self.owner:
            since, left = self.since / MICROS, max(0, self.ends - self.now) / MICROS
            who = read_label(self.label)
            holders.insert(0, Holder(*who, Mode.EXCLUSIVE, self.token, (), since, left))
        waiters = [
            Waiter(*read_label(e.label), e.mode, e.since / MICROS, e.behind)
            for e in self.entries if not e.token
        ]  # fmt: skip
        limit = self.entries[0].limit if self.entries else 0
        return LockInfo(self.name, limit, tuple(holders), tuple(waiters))


def empty_state(name: str, now: int, store: str) -> RowState:
    """Returns the state of a name that has no row yet."""
    return RowState(name, now, store)


def read_state(row: Row, name: str, store: str) -> RowState:
    """Decodes a row of now, version, token, owner, label, since, ends, crowd, name and skew, and
    drops what has expired. Raises ``Incompatible`` for a row that this version can't have written.
    """
    try:
        return parse_state(row, name, store)
    except ValueError as error:
        raise Incompatible(
            f"the row of {name!r} on {store} can't be read: {error}. It is damaged, or another "
            "version wrote it. When no client uses the name, delete its row in the table of locks"
        ) from None


def read_record(row: Row, name: str, store: str) -> Record:
    """Decodes a row of value, token and age. Raises ``Incompatible`` if it can't be read."""
    try:
        value, token, age = (value or b"" for value in row)
        aged = 0 if age.startswith(b"-") else _number(age)  # the clock was set back
        return Record(_text(value), _number(token), aged / MICROS)
    except ValueError as error:
        raise Incompatible(f"the record of {name!r} on {store} can't be read: {error}") from None


def parse_state(row: Row, name: str, store: str) -> RowState:
    """Like ``read_state``, but raises ``ValueError``, with a text that shows no stored value."""
    now, version, token, owner, label, since, ends, entries, _, skew = (v or b"" for v in row)
    state = RowState(name, _number(now), store)
    state.skew = _number(skew)
    state.version, state.token = _number(version, COUNTS), _number(token, COUNTS)
    state.since, state.ends = _number(since), _number(ends)
    state.owner = _text(owner)
    state.label = label.decode(errors="replace")  # it is only displayed
    if entries:
        *lines, rest = _text(entries).split("\n")
        if rest:
            raise ValueError("its last entry is incomplete")
        state.entries = [_read_entry(line) for line in lines]
    state.drop_expired()
    return state


def _read_entry(line: str) -> RowEntry:
    words = line.split(" ", 11)
    if len(words) != 12:
        raise ValueError("an entry has too few words")
    owner, mode, token, ends, subscription, called, since, weight, limit, behind, slots, label = (
        words
    )
    if mode not in _MODES or not owner or slots.count(",") >= MOST_SLOTS:
        raise ValueError("an entry has no owner, an unknown mode or too many slots")
    return RowEntry(
        owner, mode, _number(weight, LARGEST_LIMIT), _number(limit, LARGEST_LIMIT),
        _read_text(label), _number(since), _number(ends), _number(token, COUNTS),
        () if slots == NONE else tuple(_number(n, LARGEST_LIMIT) for n in slots.split(",")),
        0 if called == NONE else _number(called.removeprefix(CALLED)),
        "" if subscription == NONE else subscription, _number(behind),
    )  # fmt: skip


def _number(text: bytes | str, most: int = LARGEST_NUMBER) -> int:
    if text.isascii() and text.isdigit() and len(text) < 20 and (number := int(text)) <= most:
        return number
    raise ValueError(f"a number is not between 0 and {most}")


def _text(stored: bytes) -> str:
    try:
        return stored.decode()
    except UnicodeDecodeError:
        raise ValueError("a text is not UTF-8") from None


def _read_text(label: str) -> str:
    try:
        text = json.loads(label)
    except (ValueError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise ValueError("the label of an entry is not a text")
    return text
