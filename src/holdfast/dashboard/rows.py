"""What is shown of a store: a row for each name, sorted and filtered, and the tree of who blocks
whom. Pure values: no clock, no I/O."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.claim import is_election

if TYPE_CHECKING:
    from holdfast import AsyncLocks, Holder, LockInfo, Locks, Waiter

__all__ = [
    "SORTS",
    "Branch",
    "Row",
    "matching",
    "row_of",
    "store_of",
    "tree",
]

DEEPEST = 12
"""Levels of the tree; what is below is left out."""
MOST_BRANCHES = 2000
"""Lines of the tree; what follows is left out."""

Who = tuple[str, int, str]
"""Host, process id, and thread or task: how a holder is known again as a waiter."""


class Row(NamedTuple):
    """One name in use. Durations are seconds; clocks that disagree give no negative ones."""

    info: LockInfo
    kind: str
    waiting: int
    """How many wait, also behind the first of their process."""
    wait_seconds: float
    """How long the first in line has waited; 0 if nobody waits, or only to follow a leader: the
    standbys of an election wait for as long as all is well."""
    hold_seconds: float
    """How long the oldest hold has lasted; 0 if nobody holds it."""
    left_seconds: float
    """When the first of its holds ends without a renewal; infinite if nobody holds it."""

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def is_election(self) -> bool:
        return is_election(self.kind)


class Branch(NamedTuple):
    """One line of the tree: a name, one of its holders, or one of its waiters."""

    depth: int
    name: str
    what: str
    """``name``, ``holder`` or ``waiter``."""
    who: Holder | Waiter | None
    circular: bool = False
    """Whether this name is among its own ancestors: a circle of waiters, a deadlock."""


def store_of(locks: Locks | AsyncLocks) -> str:
    """The store as messages name it: without a password."""
    return repr(locks).removeprefix(f"<{type(locks).__name__} ").removesuffix(">")


def row_of(info: LockInfo, now: float) -> Row:
    """The row of one name; ``now`` is in seconds since the epoch."""
    kind = info.kind
    in_line = () if _is_led(kind, info) else info.waiters
    return Row(
        info,
        kind,
        sum(1 + waiter.behind for waiter in info.waiters),
        max((_age(waiter.since, now) for waiter in in_line), default=0.0),
        max((_age(holder.since, now) for holder in info.holders), default=0.0),
        min((_number(holder.remaining) for holder in info.holders), default=math.inf),
    )


def _is_led(kind: str, info: LockInfo) -> bool:
    """Whether those who wait only stand by to follow a leader."""
    return is_election(kind) and bool(info.holders)


def _age(since: float, now: float) -> float:
    """Seconds since a time that others wrote; 0 for what is no time, or in the future."""
    age = now - since
    return age if math.isfinite(age) and age > 0 else 0.0


def _number(seconds: float) -> float:
    return math.inf if math.isnan(seconds) else seconds


SORTS: dict[str, Callable[[Row], Any]] = {
    "wait": lambda row: (-row.wait_seconds, -row.waiting, -row.hold_seconds, row.name),
    "queue": lambda row: (-row.waiting, -row.wait_seconds, row.name),
    "held": lambda row: (-row.hold_seconds, row.name),
    "left": lambda row: (row.left_seconds, row.name),
    "name": lambda row: row.name,
}
"""What comes first: the longest wait, line or hold, the next end, or the name."""


def matching(rows: Iterable[Row], text: str) -> list[Row]:
    """The rows that have the text in their name, or in a host, process id or note."""
    wanted = text.casefold().strip()
    if not wanted:
        return list(rows)
    return [row for row in rows if any(wanted in part.casefold() for part in _texts(row))]


def _texts(row: Row) -> Iterator[str]:
    yield row.name
    people: tuple[Holder | Waiter, ...] = (*row.info.holders, *row.info.waiters)
    for who in people:
        yield from (who.host, str(who.pid), who.note)


def _who(who: Holder | Waiter) -> Who:
    return who.host, who.pid, who.thread


def tree(rows: Iterable[Row]) -> list[Branch]:
    """Returns who blocks whom. Below each name are its holders, then its waiters in order. Below a
    waiter are the names that it holds, if others wait for these names.

    A name stands at the top if none of its holders waits for another name; then what it blocks is
    below it. Names that nobody waits for are left out, and elections that have a leader. A waiter
    is known as a holder by the holds that it tells, in blocks. One that tells none is known by its
    host, process and thread (or task): tasks of the same name in one process are not told
    apart."""
    contended = {
        row.name: row for row in rows if row.info.waiters and not _is_led(row.kind, row.info)
    }
    holds: defaultdict[Who, list[str]] = defaultdict(list)
    for name, row in contended.items():
        for holder in row.info.holders:
            holds[_who(holder)].append(name)
    waiters = [waiter for row in contended.values() for waiter in row.info.waiters]
    blocked = {held for waiter in waiters for held in _held(waiter, contended, holds)}
    found: list[Branch] = []
    seen: set[str] = set()
    first = [name for name in contended if name not in blocked]
    for name in (*first, *contended):  # names of a circle have no top: the first of them is one
        if name not in seen and len(found) < MOST_BRANCHES:
            _grow(found, seen, contended, holds, (name,))
    return found[:MOST_BRANCHES]


def _held(waiter: Waiter, contended: dict[str, Row], holds: dict[Who, list[str]]) -> Sequence[str]:
    """The names that the waiter holds while it waits, of those that others wait for."""
    if not waiter.holds:
        return holds.get(_who(waiter), ())
    told = [(name, token) for name, token in waiter.holds if name in contended]
    return [
        name
        for name, token in told
        if any(
            (holder.token, holder.host, holder.pid) == (token, waiter.host, waiter.pid)
            for holder in contended[name].info.holders
        )
    ]


def _grow(
    found: list[Branch],
    seen: set[str],
    contended: dict[str, Row],
    holds: dict[Who, list[str]],
    path: tuple[str, ...],
) -> None:
    """Adds the lines of the last name of the path, and of what it blocks."""
    name, depth = path[-1], 2 * (len(path) - 1)
    seen.add(name)
    found.append(Branch(depth, name, "name", None))
    info = contended[name].info
    found += [Branch(depth + 1, name, "holder", holder) for holder in info.holders]
    for waiter in info.waiters:
        found.append(Branch(depth + 1, name, "waiter", waiter))
        for held in _held(waiter, contended, holds):
            if len(found) >= MOST_BRANCHES:
                return
            if held in path:
                found.append(Branch(depth + 2, held, "name", None, circular=True))
            elif len(path) < DEEPEST:
                _grow(found, seen, contended, holds, (*path, held))
