"""A job that runs once per interval across the fleet.

Intervals are counted from the epoch and compared by their starts. What is recorded is the start
of the last interval that was run, so whichever host comes first runs it, and one whose clock is
behind or ahead finds that it has been run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from holdfast.durations import Duration, seconds
from holdfast.primitives.lock import Lock, LockBase
from holdfast.primitives.once import Once
from holdfast.primitives.once_job import JobBase, Plan
from holdfast.primitives.once_outcome import Outcome, Status, Told

if TYPE_CHECKING:
    from holdfast.core.engine import Engine
    from holdfast.errors import LockTimeout
    from holdfast.primitives.terms import Terms

__all__ = ["Every", "EveryRules", "Missed", "Timetable", "make_timetable"]

K = TypeVar("K", bound=LockBase[Any])
Missed = Literal["one", "all", "skip"]

MICRO = 1_000_000
SHORTEST_SECONDS = 0.01
KEEP_SECONDS = 30 * 24 * 3600.0
MOST_MISSED = 1000
"""How many missed intervals ``missed="all"`` makes good at most."""


class Timetable(NamedTuple):
    """When a job is due. All in µs, which are exact."""

    interval: int
    offset: int
    missed: Missed
    grace: int

    @property
    def keep_seconds(self) -> float:
        """Longer than any clock is wrong, so that a forgotten interval is never run again."""
        return max(KEEP_SECONDS, 3 * self.interval / MICRO)

    def start(self, now: int) -> int:
        """The start of the interval that this moment is in."""
        return now - (now - self.offset) % self.interval

    def due(self, told: Told | None, now: int) -> int | None:
        """The start of the interval to run now, or ``None``."""
        due = self._unrun(told, self.start(now))
        if due is not None and self.missed == "skip" and now - due > self.grace:
            return None
        return due

    def _unrun(self, told: Told | None, current: int) -> int | None:
        last = 0 if told is None else told.finished
        if current > last:
            first = last + self.interval
            if self.missed != "all" or not last or (current - first) % self.interval:
                return current
            return max(first, current - MOST_MISSED * self.interval)
        # A clock that was far ahead has run what is still to come. By the store's own clock an
        # interval has passed since, so the next one is due, whatever it is called.
        if told is not None and told.ended and told.age_seconds * MICRO >= self.interval:
            return last + self.interval
        return None

    def next_seconds(self, told: Told | None, now: int) -> float:
        """How long until it may be due."""
        if self.due(told, now) is not None:
            return 0.0
        return (self.start(now) + self.interval - now) / MICRO


def make_timetable(
    interval: Duration, offset: Duration, missed: Missed, grace: Duration | None
) -> Timetable:
    """Raises ``ValueError`` for what can't be."""
    length = seconds(interval, "interval")
    if length < SHORTEST_SECONDS:
        raise ValueError(f"interval is {SHORTEST_SECONDS} s at least; not {interval!r}")
    if missed not in ("one", "all", "skip"):
        raise ValueError(f"missed is 'one', 'all' or 'skip'; not {missed!r}")
    if grace is not None and missed != "skip":
        raise ValueError("grace is how late a run may start, and goes with missed='skip'")
    late = length / 10 if grace is None else seconds(grace, "grace")
    shift = seconds(offset, "offset") if offset else 0.0
    return Timetable(round(length * MICRO), round(shift * MICRO), missed, round(late * MICRO))


class EveryRules(JobBase[K]):
    """When a job of either client is due, and what it answers when it is not."""

    _prefix = "every/"

    def __init__(
        self, engine: Engine, key: str, terms: Terms, plan: Plan, timetable: Timetable
    ) -> None:
        self._timetable = timetable
        super().__init__(engine, key, terms, plan)

    def _now(self) -> int:
        return int(self._engine.runtime.wall() * MICRO)

    def _judge(self, told: Told | None) -> Outcome | int:
        now = self._now()
        due = self._timetable.due(told, now)
        if due is not None:
            return due
        wait = self._timetable.next_seconds(told, now)
        if told is None:
            return Outcome(self.key, Status.SKIPPED, next_seconds=wait)
        return told.outcome(self.key)._replace(status=Status.SKIPPED, next_seconds=wait)

    def _busy(self, error: LockTimeout) -> Outcome:
        now = self._now()
        wait = (self._timetable.start(now) + self._timetable.interval - now) / MICRO
        return super()._busy(error)._replace(next_seconds=wait)

    def _ended(self, outcome: Outcome, told: Told) -> Outcome:
        return outcome._replace(next_seconds=self._timetable.next_seconds(told, self._now()))


class Every(EveryRules[Lock], Once):
    """A job of the blocking client that runs once per interval."""
