"""What one reader has seen of a store since it began: the newest rows, how old they are, and what
changed.

A reader sees the store now and then, never what happens in between. So it knows:

- **lost**: a hold whose renewal was overdue when it was last seen, and that was gone when its time
  was over. Its holder crashed, hung, or could not reach the store.
- **broken**: what was broken here, with its reason.
- **unreachable**, **reachable**: when the store could not be read.
- **unwatched**: when nobody looked, or this machine was suspended.

It does not know of holds that began and ended between two readings. A hold that was gone before its
time was released, or was broken by another client, or ended with its session (ZooKeeper, Consul,
advisory locks): these look the same, and are only counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from holdfast.dashboard.rows import Row, row_of

if TYPE_CHECKING:
    from holdfast import Finding, Holder, LockInfo

__all__ = ["CHECK_SECONDS", "INTERVAL_SECONDS", "MOST_NAMES", "STALE_SECONDS", "Change", "Watch"]

INTERVAL_SECONDS = 2.0
"""The least time between the beginnings of two readings, for all viewers together."""
STALE_SECONDS = 10.0
"""Rows that are older are shown as stale."""
CHECK_SECONDS = 60.0
"""How often the store is checked."""
MOST_NAMES = 20_000
"""Names that are read; of a store with more, the rest is not shown."""
GAP_SECONDS = 30.0
"""A longer time between two readings is told as a change."""
MOST_CHANGES = 500
"""Changes that are kept; older ones are dropped."""
OVERDUE = 0.5
"""A hold is renewed when two thirds of its ttl are left: below a half, its renewal is overdue."""

Key = tuple[str, str, int, str, int, tuple[int, ...]]


class Change(NamedTuple):
    """Something that happened to a hold, or to the store."""

    at: float
    """Seconds since the epoch."""
    what: str
    """``lost``, ``broken``, ``unreachable``, ``reachable`` or ``unwatched``."""
    name: str
    detail: str


class _Seen(NamedTuple):
    """A hold as it was last read."""

    holder: Holder
    most_remaining: float
    """The most that was ever left of it: close to its ttl."""


class Watch:
    """The state of one reader. Not for several threads at once, but for reading its attributes."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock, self._wall = clock, wall
        self.began = wall()
        self.readings = 0
        self.rows: tuple[Row, ...] = ()
        self.truncated = False
        """Whether the store has more names than are read."""
        self.error = ""
        """Why the last reading failed; empty if it did not."""
        self.changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        self.counts = {"lost": 0, "broken": 0, "ended": 0}
        """``ended``: holds that were gone before their time, released or not."""
        self.findings: tuple[Finding, ...] = ()
        self.check_error = ""
        self._checked_at: float | None = None
        self._read_at: float | None = None
        self._took_seconds = 0.0
        self._longest_wait_seconds = 0.0
        self._holds: dict[Key, _Seen] = {}
        self._broken: set[tuple[str, int]] = set()

    @property
    def age_seconds(self) -> float | None:
        """How old the rows are; ``None`` before the first reading."""
        return None if self._read_at is None else self._clock() - self._read_at

    @property
    def longest_wait_seconds(self) -> float:
        """How long the one that has waited longest waits by now; 0 if nobody waits."""
        longest = self._longest_wait_seconds
        return longest and longest + (self.age_seconds or 0.0)

    def aged(self, row: Row) -> Row:
        """The row by now: waits and holds are longer than when it was read, and less is left."""
        age, info = self.age_seconds or 0.0, row.info
        holders = tuple(h._replace(remaining=max(h.remaining - age, 0.0)) for h in info.holders)
        return row_of(info._replace(holders=holders), self.now())

    @property
    def is_stale(self) -> bool:
        age = self.age_seconds
        return age is not None and age > STALE_SECONDS

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next reading: reading takes at most half of the time."""
        return max(INTERVAL_SECONDS - self._took_seconds, self._took_seconds)

    @property
    def check_is_due(self) -> bool:
        return self._checked_at is None or self._clock() - self._checked_at >= CHECK_SECONDS

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._wall()

    def time(self) -> float:
        """The clock of the readings."""
        return self._clock()

    def read(self, infos: Sequence[LockInfo], began: float) -> None:
        """Takes in a reading that began at that time of ``time()``."""
        at, now = self._clock(), self._wall()
        self._took_seconds = at - began
        self.truncated = len(infos) > MOST_NAMES
        kept = infos[:MOST_NAMES]
        self.rows = tuple(row_of(info, now) for info in kept)
        self._longest_wait_seconds = max((row.wait_seconds for row in self.rows), default=0.0)
        gap = began - (began if self._read_at is None else self._read_at)
        if self.error:
            self._add("reachable", "", f"after {gap:.0f} s")
            self._checked_at = None  # what was found before, or was not, is out of date
        elif gap > GAP_SECONDS:
            self._add("unwatched", "", f"not read for {gap:.0f} s")
        self.error = ""
        # Of more names than are read, other ones may be read each time: nothing has ended then.
        seen = () if self.truncated else kept
        if self.truncated:
            self._holds = {}
        self._compare({_key(i.name, h): h for i in seen for h in i.holders}, began)
        self._read_at = began
        self.readings += 1

    def failed(self, error: BaseException) -> None:
        """Takes in that the store could not be read."""
        text = str(error) or type(error).__name__
        if not self.error:
            self._add("unreachable", "", text)
        self.error = text
        self._took_seconds = 0.0

    def checked(self, findings: Iterable[Finding]) -> None:
        """Takes in what ``check()`` found."""
        self.findings, self.check_error = tuple(findings), ""
        self._checked_at = self._clock()

    def check_failed(self, error: BaseException) -> None:
        """Takes in that ``check()`` failed: a guarantee is broken, or the store away."""
        self.findings, self.check_error = (), str(error) or type(error).__name__
        self._checked_at = self._clock()

    def broke(self, name: str, holders: Iterable[Holder], reason: str) -> None:
        """Takes in a break that was done here."""
        for holder in holders:
            self._broken.add((name, holder.token))
            self._add("broken", name, f"{holder}: {reason}")

    def _compare(self, holders: dict[Key, Holder], at: float) -> None:
        """Finds what became of the holds of the reading before."""
        for key, seen in self._holds.items():
            if key not in holders:
                self._ended(key, seen, at)
        before = self._holds
        self._holds = {}
        for key, holder in holders.items():
            most = before[key].most_remaining if key in before else 0.0
            self._holds[key] = _Seen(holder, max(most, holder.remaining))
        self._broken &= {(key[0], key[4]) for key in holders}

    def _ended(self, key: Key, seen: _Seen, at: float) -> None:
        if (key[0], key[4]) in self._broken:
            return
        assert self._read_at is not None
        left = seen.holder.remaining
        overdue = left <= seen.most_remaining * OVERDUE
        if overdue and self._read_at + left <= at:
            self._add("lost", key[0], str(seen.holder))
        else:
            self.counts["ended"] += 1

    def _add(self, what: str, name: str, detail: str) -> None:
        if what in self.counts:
            self.counts[what] += 1
        self.changes.append(Change(self._wall(), what, name, detail))


def _key(name: str, holder: Holder) -> Key:
    return name, holder.host, holder.pid, holder.thread, holder.token, holder.slots
