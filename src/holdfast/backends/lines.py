"""Holds and waiters of one name as entries in one order: who fits, and who waits for what.

For stores that keep an entry per claim, ordered by the store itself (etcd, Consul). Pure rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

from holdfast.claim import Claim, Holder, Mode, Standing, Waiter, read_label
from holdfast.core.admit import Share, check_limit, fits, free_slots
from holdfast.core.contract import GRACE_SECONDS

__all__ = ["Entry", "Patience", "Verdict", "escape", "judge", "standing", "unescape"]

REMEMBERED = 1024


def escape(text: str) -> str:
    """Any text as one segment of a key: letters, digits, ``_``, ``-``, ``~`` and ``%``."""
    return quote(text, safe="").replace(".", "%2E")


def unescape(segment: str) -> str:
    return unquote(segment)


class Entry(NamedTuple):
    """One claim as it is stored."""

    key: str
    owner: str
    order: int
    """The store's own order of arrival."""
    changed: int
    """When it was last written, in the same order."""
    token: int
    session: str
    mode: Mode
    limit: int
    weight: int
    held: bool
    settled: bool
    """Whether the entry itself says that it is a hold."""
    behind: int
    since: float
    slots: tuple[int, ...]
    label: str

    @property
    def share(self) -> Share:
        return Share(self.mode, self.weight, self.slots)


class Verdict(NamedTuple):
    """What a line means for one claim."""

    own: Entry | None
    fits: bool
    place: int
    """How many wait in front."""
    slots: tuple[int, ...]
    """The slots to take, where it fits."""
    target: str
    """The key whose end lets the claim in, or at least nearer; empty: any end of the name's."""
    absent: tuple[Entry, ...]
    """Those in front that could hold already and have not come yet."""


def judge(claim: Claim, line: Sequence[Entry], store: str) -> Verdict:
    """Judges a line in order. Raises ``LimitMismatch`` if the name is in use as something else."""
    own = next((entry for entry in line if entry.owner == claim.owner), None)
    others = [entry for entry in line if entry is not own]
    if others:
        slots = others[0].mode is Mode.SLOTS
        check_limit(claim, others[0].limit, slots=slots, store=store)
    holders = [entry for entry in others if entry.held]
    ahead = [e for e in others if not e.held and (own is None or e.order < own.order)]
    taken = [entry.share for entry in (*holders, *ahead)]
    fit = fits(claim.mode, claim.weight, claim.limit, taken)
    numbers: tuple[int, ...] = ()
    if fit and claim.mode is Mode.SLOTS:
        numbers = free_slots(claim.weight, claim.limit, (entry.share for entry in holders))
    target = "" if fit else _target(claim, holders, ahead)
    return Verdict(own, fit, len(ahead), numbers, target, _absent(holders, ahead))


def _target(claim: Claim, holders: list[Entry], ahead: list[Entry]) -> str:
    """The one in front: for readers the last writer, for slots the last waiter or any holder."""
    if claim.mode is Mode.SHARED:
        front = [entry for entry in (*holders, *ahead) if entry.mode is not Mode.SHARED]
    elif claim.mode is Mode.SLOTS:
        front = ahead
    else:
        front = [*holders, *ahead]
    return max(front, key=lambda entry: entry.order).key if front else ""


def _absent(holders: list[Entry], ahead: list[Entry]) -> tuple[Entry, ...]:
    taken = [entry.share for entry in holders]
    absent = []
    for entry in ahead:
        if not fits(entry.mode, entry.weight, entry.limit, taken):
            break
        absent.append(entry)
        taken.append(entry.share)
    return tuple(absent)


class Patience:
    """Since when those in front could hold and have not come, as one backend has seen it."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}

    def judge(self, absent: Iterable[Entry], now: float) -> tuple[Entry | None, float | None]:
        """Whom to skip because its grace is over, or else when to look again."""
        if len(self._since) > REMEMBERED:
            self._since.clear()
        left: list[float] = []
        for entry in absent:
            since = self._since.setdefault((entry.key, entry.changed), now)
            left.append(since + GRACE_SECONDS - now)
            if left[-1] <= 0:
                return entry, None
        return None, min(left, default=None)


def standing(name: str, line: Iterable[Entry], remaining: dict[str, float]) -> Standing:
    """What people are shown; ``remaining`` is by session."""
    line = list(line)
    holders = tuple(
        Holder(
            *read_label(entry.label),
            entry.mode,
            entry.token,
            entry.slots,
            entry.since,
            remaining.get(entry.session, 0.0),
        )
        for entry in line
        if entry.held
    )
    waiters = tuple(
        Waiter(*read_label(entry.label), entry.mode, entry.since, entry.behind)
        for entry in line
        if not entry.held
    )
    return Standing(name, line[0].limit if line else 0, holders, waiters)
