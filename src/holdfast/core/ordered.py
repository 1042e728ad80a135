"""The queue of one name as ordered entries: which claim fits, and which entry it waits for.

For stores that keep one entry per claim in an order of their own (etcd, Consul). Pure rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import quote, unquote

from holdfast.claim import Claim, Holder, LockInfo, Mode, Waiter, read_holds, read_label
from holdfast.core.admit import Share, check_limit, fits, free_slots
from holdfast.core.contract import DIRECT_GRANT_SECONDS, GRACE_SECONDS
from holdfast.errors import Incompatible

__all__ = [
    "AbsentWaiters",
    "Details",
    "Entry",
    "Verdict",
    "absent_of",
    "escape",
    "judge",
    "lock_info",
    "shown_unreadable",
    "unescape",
    "unreadable",
]

REMEMBERED = 1024


def escape(text: str) -> str:
    """Any text as one segment of a key: letters, digits, ``_``, ``-``, ``~`` and ``%``."""
    return quote(text, safe="").replace(".", "%2E")


def unescape(segment: str) -> str:
    return unquote(segment)


def unreadable(store: str, prefix: str) -> Incompatible:
    """The error for a name whose keys or values can't be read."""
    name = unescape(prefix.rstrip("/").rpartition("/")[2])
    return Incompatible(
        f"what {store} keeps for {name!r} was written by a version of Holdfast that this one does "
        "not understand, or by other software"
    )


def shown_unreadable(segment: str, error: Incompatible | None = None) -> LockInfo:
    """What a list shows for a name that can't be read. ``segment`` is the escaped name."""
    why = error or "its key is not written as Holdfast writes it"
    notice = f"what is stored under this name can't be read: {why}"
    return LockInfo(unescape(segment), 0, (), (), notice)


class Details(NamedTuple):
    """The fields of an entry that are not in its key."""

    token: int
    weight: int
    held: bool
    settled: bool
    """Whether the entry itself says that it was granted."""
    behind: int
    since: float
    slots: tuple[int, ...]
    label: str


class Entry:
    """One claim as it is stored. Its details are read on demand: a queue may be long."""

    __slots__ = (
        "_details",
        "_held",
        "_read",
        "changed",
        "key",
        "limit",
        "mode",
        "order",
        "owner",
        "session",
    )

    def __init__(
        self,
        key: str,
        owner: str,
        order: int,
        changed: int,
        session: str,
        mode: Mode,
        limit: int,
        read: Callable[[], Details],
        held: bool | None = None,
    ) -> None:
        self.key, self.owner, self.session = key, owner, session
        self.mode, self.limit = mode, limit
        self.order, self.changed = order, changed
        """The store's order of its arrival, and of its last change."""
        self._read, self._held = read, held
        self._details: Details | None = None

    @property
    def details(self) -> Details:
        if self._details is None:
            self._details = self._read()
        return self._details

    @property
    def held(self) -> bool:
        return self.details.held if self._held is None else self._held

    @property
    def given(self) -> bool:
        """Whether it was granted; after a direct grant its owner may not know yet."""
        return self.held or self.details.settled

    @property
    def share(self) -> Share:
        details = self.details
        return Share(self.mode, details.weight, details.slots)


class Verdict(NamedTuple):
    """What a queue means for one claim."""

    own: Entry | None
    fits: bool
    place: int
    """How many entries wait in front."""
    slots: tuple[int, ...]
    """The slots to take, if it fits."""
    front: Entry | None
    """The entry to wait for; ``None`` if the end of any entry may let the claim fit."""
    absent: tuple[Entry, ...]
    """The entries in front that fit and have not entered yet."""

    @property
    def target(self) -> str:
        return "" if self.front is None else self.front.key


def judge(claim: Claim, queue: Sequence[Entry], store: str) -> Verdict:
    """Decides for one claim, from the entries in order. Raises ``LimitMismatch`` if the name is in
    use in another way, and ``Incompatible`` if its first entry can't be read."""
    own = next((entry for entry in queue if entry.owner == claim.owner), None)
    ahead = [e for e in queue if e is not own and (own is None or e.order < own.order)]
    first = next((entry for entry in queue if entry is not own), None)
    if first is not None:
        _ = first.details  # raises ``Incompatible`` for another version
        check_limit(claim, first.limit, slots=first.mode is Mode.SLOTS, store=store)
    front = _Front(ahead)
    fit = not front.closed and fits(claim.mode, claim.weight, claim.limit, front.taken)
    numbers: tuple[int, ...] = ()
    if fit and claim.mode is Mode.SLOTS:
        shares = (entry.share for entry in queue if entry is not own)
        numbers = free_slots(claim.weight, claim.limit, shares)
    target = None if fit else _target(claim, ahead, front)
    return Verdict(own, fit, len(ahead) - front.held, numbers, target, tuple(front.absent))


class _Front:
    """The entries in front, up to the first that does not fit: no entry behind that can hold."""

    def __init__(self, ahead: Iterable[Entry]) -> None:
        self.taken: list[Share] = []
        self.absent: list[Entry] = []
        self.held = 0
        self.closed = False
        for entry in ahead:
            if entry.held:
                self.held += 1
            elif fits(entry.mode, entry.details.weight, entry.limit, self.taken):
                self.absent.append(entry)
                self.held += entry.given
            else:
                self.closed = True
                return
            self.taken.append(entry.share)


def absent_of(first: Iterable[Entry]) -> tuple[Entry, ...]:
    """Of the first entries of a queue, those that fit and have not entered yet."""
    return tuple(_Front(first).absent)


def _target(claim: Claim, ahead: list[Entry], front: _Front) -> Entry | None:
    """The entry to wait for: for a reader the last writer in front; for slots the last waiter in
    front, or ``None`` for any holder."""
    if claim.mode is Mode.SHARED:
        ahead = [entry for entry in ahead if entry.mode is not Mode.SHARED]
    elif claim.mode is Mode.SLOTS:
        ahead = ahead if front.closed else front.absent
    return ahead[-1] if ahead else None


class AbsentWaiters:
    """Waiters that could enter and have not: since when, as one backend has seen it."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}

    def note(self, key: str, changed: int, at: float) -> None:
        """The entry may have been granted by this change, which was seen at this time: its grace
        starts then, if the grant is still not taken when the entry is read."""
        self._since.setdefault((key, changed), at)

    def judge(self, absent: Iterable[Entry], now: float) -> tuple[Entry | None, float | None]:
        """The entry to skip because its grace is over; else ``None``, and the seconds until a
        grace is over (``None`` if no waiter is absent)."""
        while len(self._since) > REMEMBERED:  # drops the oldest: most have entered
            with suppress(RuntimeError):  # another thread changed it at the same time
                self._since.pop(next(iter(self._since)), None)
        left: list[float] = []
        for entry in absent:
            since = self._since.setdefault((entry.key, entry.changed), now)
            grace = DIRECT_GRANT_SECONDS if entry.given else GRACE_SECONDS
            left.append(since + grace - now)
            if left[-1] <= 0:
                return entry, None
        return None, min(left, default=None)


def lock_info(name: str, queue: Iterable[Entry], remaining: dict[str, float]) -> LockInfo:
    """Holders and waiters, for people. ``remaining`` has seconds by session."""
    holders: list[Holder] = []
    waiters: list[Waiter] = []
    limit = 0
    for entry in queue:
        limit, details = entry.limit, entry.details
        who = read_label(details.label)
        if entry.given:
            left = remaining.get(entry.session, 0.0)
            holders.append(
                Holder(*who, entry.mode, details.token, details.slots, details.since, left)
            )
        else:
            holds = read_holds(details.label)
            waiters.append(Waiter(*who, entry.mode, details.since, details.behind, holds))
    return LockInfo(name, limit, tuple(holders), tuple(waiters))
