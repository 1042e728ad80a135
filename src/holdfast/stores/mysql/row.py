"""One name's row as values: who holds it, who waits, and what follows from that.

The rules are ``backends.memory``'s. The row is read, decided on here, and written back if nobody
has changed it meanwhile. A hold that is alone is in columns of its own; the crowd, which is
everybody who waits and those who hold together, is one text: a line for each, whose first words
the server can read too (``mysql_lease_sql``). Times are the server's, in µs.
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
    "Entry",
    "State",
    "Wake",
    "empty_state",
    "parse_state",
    "read_record",
    "read_state",
]

MICROS = 1_000_000
NONE = "-"
"""Stands for a word that is empty."""
CALLED = "r"
"""Stands before the end of a reservation, right behind the subscription of who was called."""
_GRACE, _STALE = int(GRACE_SECONDS * MICROS), int(STALE_SECONDS * MICROS)
LARGEST_NUMBER = 2**63 - 1
COUNTS = LARGEST_NUMBER - 1
"""The most that can still be counted up."""
LARGEST_LIMIT = 2**31 - 1
MOST_SLOTS = 65536
_MODES: dict[str, Mode] = {mode.value: mode for mode in Mode}


class Wake(NamedTuple):
    """Somebody to be told that another attempt is worth it."""

    subscription: str
    owner: str


class Entry:
    """One of the crowd: a waiter, or a holder (with a token) that is not alone."""

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

    def line(self) -> str:
        """As it is stored."""
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

    def over(self, now: int, skew: int) -> bool:
        """Whether its hold ran out by all clocks, or, of a waiter, whether it is to be skipped."""
        if self.token:
            return self.ends <= now - skew
        return self.ends <= now or 0 < self.reserved < now


class State:
    """A name's state at one moment of the server's clock."""

    __slots__ = (
        "changed", "crowd", "ends", "label", "name", "now", "owner", "since", "skew", "store",
        "token", "version", "wakes",
    )  # fmt: skip

    def __init__(self, name: str, now: int, store: str) -> None:
        self.name, self.now, self.store = name, now, store
        self.version = self.token = self.since = self.ends = 0
        self.owner = self.label = ""
        self.skew = 0
        """So far the clock of whoever wrote it may be behind that of ``now``, in µs."""
        self.crowd: list[Entry] = []
        self.changed = False
        self.wakes: list[Wake] = []
        """Whom to ring once this is written."""

    def tidy(self) -> None:
        """Ends what has run out and skips who is gone."""
        if self.owner and self.ends <= self.now - self.skew:
            self._vacate()
        for entry in [entry for entry in self.crowd if entry.over(self.now, self.skew)]:
            self._remove(entry)

    def _vacate(self) -> None:
        self.owner, self.ends, self.changed = "", 0, True

    def _remove(self, entry: Entry) -> None:
        self.crowd.remove(entry)
        self.changed = True

    def find(self, owner: str) -> Entry | None:
        """The entry of an owner."""
        return next((entry for entry in self.crowd if entry.owner == owner), None)

    def taken(self) -> list[Share]:
        """What is held."""
        held = [entry.share for entry in self.crowd if entry.token]
        return [Share(Mode.EXCLUSIVE, 1), *held] if self.owner else held

    def attempt(self, claim: Claim, join: bool, subscription: str) -> Grant | Busy:
        """Admits the claim if it fits behind those in front of it; else lines it up."""
        mine = self.find(claim.owner)
        if self.owner == claim.owner or (mine is not None and mine.token):
            return self._again(claim, mine)
        self._check_limit(claim)
        ahead: list[Share] = []
        for entry in self.crowd:
            if entry is mine:
                break
            if not entry.token:
                ahead.append(entry.share)
        if admit.fits(claim.mode, claim.weight, claim.limit, self.taken() + ahead):
            return self._grant(claim, mine)
        return self._busy(claim, mine, len(ahead), join, subscription)

    def _again(self, claim: Claim, mine: Entry | None) -> Grant:
        """A retry whose first answer was lost: the same grant, its ttl renewed."""
        self.extend(claim.owner, claim.ttl)
        if mine is None:
            return Grant(claim, self.token)
        return Grant(claim, mine.token, mine.slots)

    def _check_limit(self, claim: Claim) -> None:
        if self.owner:
            admit.check_limit(claim, 0, slots=False, store=self.store)
        other = next((entry for entry in self.crowd if entry.owner != claim.owner), None)
        if other is not None:
            slots = other.mode is Mode.SLOTS
            admit.check_limit(claim, other.limit, slots=slots, store=self.store)

    def _grant(self, claim: Claim, mine: Entry | None) -> Grant:
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
            held = sum(entry.token > 0 for entry in self.crowd)  # they stand in front
            self.crowd.insert(held, self._entry(claim, ends, token=self.token, slots=slots))
        return Grant(claim, self.token, slots)

    def _entry(self, claim: Claim, ends: int, **more: Any) -> Entry:
        return Entry(
            claim.owner, claim.mode.value, claim.weight, claim.limit, claim.label, self.now, ends,
            **more,
        )  # fmt: skip

    def _busy(
        self, claim: Claim, mine: Entry | None, place: int, join: bool, subscription: str
    ) -> Busy:
        stale = self.now + _STALE
        if mine is not None:
            mine.ends, mine.reserved, mine.subscription, self.changed = stale, 0, subscription, True
        elif join:
            if sum(not entry.token for entry in self.crowd) >= QUEUE_CAP:
                return Busy(
                    place, 1.0, subscription, f"{QUEUE_CAP} already wait for {claim.name!r}"
                )
            self.crowd.append(self._entry(claim, stale, subscription=subscription))
            self.changed = True
        return Busy(place, self._soonest(), ref=subscription)

    def _soonest(self) -> float | None:
        """The soonest end of a hold or a reservation; both are 0 where there is none."""
        ends = [entry.ends if entry.token else entry.reserved for entry in self.crowd]
        soonest = min(filter(None, [self.ends, *ends]), default=None)
        return None if soonest is None else max(0, soonest + self.skew - self.now) / MICROS

    def holds(self, owner: str) -> bool:
        """Whether the owner holds it now."""
        mine = self.find(owner)
        return self.owner == owner or (mine is not None and mine.token > 0)

    def extend(self, owner: str, ttl: float, *, shorten: bool = False) -> bool:
        """Renews the owner's hold; whether it has one. An end that is later stays, unless it is to
        be shortened: a request may arrive long after later ones."""
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
        if not self.release(owner) and (mine := self.find(owner)) is not None:
            self._remove(mine)

    def clear(self) -> list[int]:
        """Ends all holds; answers their tokens."""
        tokens = [self.token] if self.owner else []
        if self.owner:
            self._vacate()
        for entry in [entry for entry in self.crowd if entry.token]:
            tokens.append(entry.token)
            self._remove(entry)
        return tokens

    def refresh(self, owner: str, behind: int) -> bool:
        """Keeps a waiter's place for another while; whether it still had one."""
        mine = self.find(owner)
        if mine is None or mine.token:
            return False
        mine.ends, mine.behind, self.changed = self.now + _STALE, behind, True
        return True

    def skip(self, subscriptions: set[str]) -> None:
        """Takes those out of the line whose subscriptions are gone."""
        for entry in [e for e in self.crowd if not e.token and e.subscription in subscriptions]:
            self._remove(entry)

    def settle(self, caller: str = "") -> None:
        """Reserves the name for those who now fit, and notes whom to ring."""
        taken: list[Share] | None = None
        for entry in self.crowd:
            if entry.token:
                continue
            taken = self.taken() if taken is None else taken
            share = entry.share
            if not admit.fits(share.mode, share.weight, entry.limit, taken):
                return
            if not entry.reserved:
                entry.reserved, self.changed = self.now + _GRACE, True
                if entry.subscription and entry.owner != caller:
                    self.wakes.append(Wake(entry.subscription, entry.owner))
            taken.append(share)

    def crowd_text(self) -> bytes:
        """The crowd as it is stored; empty for nobody."""
        return "".join([entry.line() for entry in self.crowd]).encode()

    def standing(self) -> LockInfo:
        """What people are shown."""
        holders = [
            Holder(
                *read_label(e.label), e.mode, e.token, e.slots, e.since / MICROS,
                max(0, e.ends - self.now) / MICROS,
            )
            for e in self.crowd if e.token
        ]  # fmt: skip
        if self.owner:
            since, left = self.since / MICROS, max(0, self.ends - self.now) / MICROS
            who = read_label(self.label)
            holders.insert(0, Holder(*who, Mode.EXCLUSIVE, self.token, (), since, left))
        waiters = [
            Waiter(*read_label(e.label), e.mode, e.since / MICROS, e.behind)
            for e in self.crowd if not e.token
        ]  # fmt: skip
        limit = self.crowd[0].limit if self.crowd else 0
        return LockInfo(self.name, limit, tuple(holders), tuple(waiters))


def empty_state(name: str, now: int, store: str) -> State:
    """A name that has no row yet."""
    return State(name, now, store)


def read_state(row: Row, name: str, store: str) -> State:
    """A row of now, version, token, owner, label, since, ends, crowd, name and skew, tidied.

    Raises ``Incompatible`` for one that this version can't have written.
    """
    try:
        return parse_state(row, name, store)
    except ValueError as error:
        raise Incompatible(
            f"what is stored under {name!r} on {store} can't be read: {error}. Another version "
            "may have written it, or it is damaged: delete the name's row in the table of locks "
            "once nobody uses it"
        ) from None


def read_record(row: Row, name: str, store: str) -> Record:
    """A row of value, token and age; raises ``Incompatible`` for one that can't be read."""
    try:
        value, token, age = (value or b"" for value in row)
        aged = 0 if age.startswith(b"-") else _number(age)  # the clock went back
        return Record(_text(value), _number(token), aged / MICROS)
    except ValueError as error:
        raise Incompatible(f"the record of {name!r} on {store} can't be read: {error}") from None


def parse_state(row: Row, name: str, store: str) -> State:
    """The same; raises ``ValueError``, in words that show nothing of what is stored."""
    now, version, token, owner, label, since, ends, crowd, _, skew = (v or b"" for v in row)
    state = State(name, _number(now), store)
    state.skew = _number(skew)
    state.version, state.token = _number(version, COUNTS), _number(token, COUNTS)
    state.since, state.ends = _number(since), _number(ends)
    state.owner = _text(owner)
    state.label = label.decode(errors="replace")  # only shown, and nobody else's matter
    if crowd:
        *lines, rest = _text(crowd).split("\n")
        if rest:
            raise ValueError("its line has no end")
        state.crowd = [_read_entry(line) for line in lines]
    state.tidy()
    return state


def _read_entry(line: str) -> Entry:
    words = line.split(" ", 11)
    if len(words) != 12:
        raise ValueError("somebody in its line has too few words")
    owner, mode, token, ends, subscription, called, since, weight, limit, behind, slots, label = (
        words
    )
    if mode not in _MODES or not owner or slots.count(",") >= MOST_SLOTS:
        raise ValueError("somebody in its line wants what there is not")
    return Entry(
        owner, mode, _number(weight, LARGEST_LIMIT), _number(limit, LARGEST_LIMIT),
        _read_text(label), _number(since), _number(ends), _number(token, COUNTS),
        () if slots == NONE else tuple(_number(n, LARGEST_LIMIT) for n in slots.split(",")),
        0 if called == NONE else _number(called.removeprefix(CALLED)),
        "" if subscription == NONE else subscription, _number(behind),
    )  # fmt: skip


def _number(text: bytes | str, most: int = LARGEST_NUMBER) -> int:
    if text.isascii() and text.isdigit() and len(text) < 20 and (number := int(text)) <= most:
        return number
    raise ValueError(f"a number of it is none from 0 to {most}")


def _text(stored: bytes) -> str:
    try:
        return stored.decode()
    except UnicodeDecodeError:
        raise ValueError("a text of it is no UTF-8") from None


def _read_text(label: str) -> str:
    try:
        text = json.loads(label)
    except (ValueError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise ValueError("what somebody in its line says of itself is no text")
    return text
