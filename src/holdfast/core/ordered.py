"""Holds and waiters of one name as entries in one order: who fits, and who waits for what.

For stores that keep an entry per claim, ordered by the store itself (etcd, Consul). Pure rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import quote, unquote

from holdfast.claim import Claim, Holder, LockInfo, Mode, Waiter, read_label
from holdfast.core.admit import Share, check_limit, fits, free_slots
from holdfast.core.contract import DIRECT_GRANT_SECONDS, GRACE_SECONDS
from holdfast.errors import Incompatible

__all__ = ["Details", "Entry", "Patience", "Verdict", "escape", "judge", "standing", "unescape"]

REMEMBERED = 1024


def escape(text: str) -> str:
    """Any text as one segment of a key: letters, digits, ``_``, ``-``, ``~`` and ``%``."""
    return quote(text, safe="").replace(".", "%2E")


def unescape(segment: str) -> str:
    return unquote(segment)


def unreadable(store: str, prefix: str) -> Incompatible:
    """What to raise if something under the keys of a name can't be read."""
    name = unescape(prefix.rstrip("/").rpartition("/")[2])
    return Incompatible(
        f"what {store} keeps for {name!r} was written by a version of Holdfast that this one does "
        "not understand, or by something else"
    )


def shown_unreadable(segment: str, error: Incompatible | None = None) -> LockInfo:
    """What people are shown of a name that can't be read: the others are shown as always."""
    why = error or "its key is not written as Holdfast writes it"
    notice = f"what is stored under this name can't be read: {why}"
    return LockInfo(unescape(segment), 0, (), (), notice)


class Details(NamedTuple):
    """What an entry says, beyond what its key tells."""

    token: int
    weight: int
    held: bool
    settled: bool
    """Whether the entry itself says that it was given what it claims."""
    behind: int
    since: float
    slots: tuple[int, ...]
    label: str


class Entry:
    """One claim as it is stored. It is read only as far as somebody asks: lines may be long."""

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
        """The store's own order, of its arrival and of its last change."""
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
        """Whether it was given what it claims, although it may not have come for it yet."""
        return self.held or self.details.settled

    @property
    def share(self) -> Share:
        details = self.details
        return Share(self.mode, details.weight, details.slots)


class Verdict(NamedTuple):
    """What a line means for one claim."""

    own: Entry | None
    fits: bool
    place: int
    """How many wait in front."""
    slots: tuple[int, ...]
    """The slots to take, where it fits."""
    front: Entry | None
    """Whose end lets the claim in, or at least nearer; ``None``: any end of the name's."""
    absent: tuple[Entry, ...]
    """Those in front that could hold already and have not come yet."""

    @property
    def target(self) -> str:
        return "" if self.front is None else self.front.key


def judge(claim: Claim, line: Sequence[Entry], store: str) -> Verdict:
    """Judges a line in order. Raises ``LimitMismatch`` if the name is in use as something else."""
    own = next((entry for entry in line if entry.owner == claim.owner), None)
    ahead = [e for e in line if e is not own and (own is None or e.order < own.order)]
    first = next((entry for entry in line if entry is not own), None)
    if first is not None:
        _ = first.details  # raises what is to be said of a foreign version
        check_limit(claim, first.limit, slots=first.mode is Mode.SLOTS, store=store)
    front = _Front(ahead)
    fit = not front.closed and fits(claim.mode, claim.weight, claim.limit, front.taken)
    numbers: tuple[int, ...] = ()
    if fit and claim.mode is Mode.SLOTS:
        shares = (entry.share for entry in line if entry is not own)
        numbers = free_slots(claim.weight, claim.limit, shares)
    target = None if fit else _target(claim, ahead, front)
    return Verdict(own, fit, len(ahead) - front.held, numbers, target, tuple(front.absent))


class _Front:
    """Those in front, read up to the first that does not fit: behind it nobody can hold."""

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


def _target(claim: Claim, ahead: list[Entry], front: _Front) -> Entry | None:
    """The one in front: for readers the last writer, for slots the last waiter or any holder."""
    if claim.mode is Mode.SHARED:
        ahead = [entry for entry in ahead if entry.mode is not Mode.SHARED]
    elif claim.mode is Mode.SLOTS:
        ahead = ahead if front.closed else front.absent
    return ahead[-1] if ahead else None


class Patience:
    """Since when those in front could hold and have not come, as one backend has seen it."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}

    def judge(self, absent: Iterable[Entry], now: float) -> tuple[Entry | None, float | None]:
        """Whom to skip because its grace is over, or else when to look again."""
        while len(self._since) > REMEMBERED:  # the oldest go: who has come is among them
            with suppress(RuntimeError):  # another thread looked in the same moment
                self._since.pop(next(iter(self._since)), None)
        left: list[float] = []
        for entry in absent:
            since = self._since.setdefault((entry.key, entry.changed), now)
            grace = DIRECT_GRANT_SECONDS if entry.given else GRACE_SECONDS
            left.append(since + grace - now)
            if left[-1] <= 0:
                return entry, None
        return None, min(left, default=None)


def standing(name: str, line: Iterable[Entry], remaining: dict[str, float]) -> LockInfo:
    """What people are shown; ``remaining`` is by session."""
    holders: list[Holder] = []
    waiters: list[Waiter] = []
    limit = 0
    for entry in line:
        limit, said = entry.limit, entry.details
        who = read_label(said.label)
        if entry.given:
            left = remaining.get(entry.session, 0.0)
            holders.append(Holder(*who, entry.mode, said.token, said.slots, said.since, left))
        else:
            waiters.append(Waiter(*who, entry.mode, said.since, said.behind))
    return LockInfo(name, limit, tuple(holders), tuple(waiters))
