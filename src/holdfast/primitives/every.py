"""When a job that runs once per interval is due. The jobs are in ``once`` and ``once_async``.

Intervals are counted from the epoch and compared by their starts. The record holds the start of
the last interval that was run. So the first host runs an interval, and a host whose clock is behind
or ahead finds that the interval has been run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from holdfast.durations import Duration, seconds
from holdfast.primitives.lock import LockBase
from holdfast.primitives.once_job import JobBase, Plan
from holdfast.primitives.once_outcome import Outcome, RunRecord, Status

if TYPE_CHECKING:
    from holdfast.core.engine import Engine
    from holdfast.errors import LockTimeout
    from holdfast.primitives.options import LockOptions

__all__ = ["EveryRules", "Missed", "Timetable", "make_timetable"]

K = TypeVar("K", bound=LockBase[Any])
Missed = Literal["one", "all", "skip"]

MICRO = 1_000_000
SHORTEST_SECONDS = 0.01
KEEP_SECONDS = 30 * 24 * 3600.0
MOST_MISSED = 1000
"""How many missed intervals ``missed="all"`` runs later, at most."""


class Timetable(NamedTuple):
    """When a job is due. All values are in µs, which are exact integers."""

    interval: int
    offset: int
    missed: Missed
    grace: int

    @property
    def keep_seconds(self) -> float:
        """How long to keep the record: longer than any clock error, so that an interval whose
        record has expired is never run again."""
        return max(KEEP_SECONDS, 3 * self.interval / MICRO)

    def start(self, now: int) -> int:
        """The start of the interval that contains ``now``."""
        return now - (now - self.offset) % self.interval

    def due(self, recorded: RunRecord | None, now: int) -> int | None:
        """The start of the interval to run now, or ``None``."""
        due = self._unrun(recorded, self.start(now))
        if due is not None and self.missed == "skip" and now - due > self.grace:
            return None
        return due

    def _unrun(self, recorded: RunRecord | None, current: int) -> int | None:
        last = 0 if recorded is None else recorded.finished
        if current > last:
            first = last + self.interval
            if self.missed != "all" or not last or (current - first) % self.interval:
                return current
            return max(first, current - MOST_MISSED * self.interval)
        # A host whose clock was far ahead has run an interval of the future. By the store's own
        # clock an interval has passed since then, so the next one is due, whatever its start is.
        if (
            recorded is not None
            and recorded.ended
            and recorded.age_seconds * MICRO >= self.interval
        ):
            return last + self.interval
        return None

    def next_seconds(self, recorded: RunRecord | None, now: int) -> float:
        """Seconds until the job may be due."""
        if self.due(recorded, now) is not None:
            return 0.0
        return (self.start(now) + self.interval - now) / MICRO


def make_timetable(
    interval: Duration, offset: Duration, missed: Missed, grace: Duration | None
) -> Timetable:
    """Checks the arguments of ``every``; raises ``ValueError``."""
    length = seconds(interval, "interval")
    if length < SHORTEST_SECONDS:
        raise ValueError(f"interval is {SHORTEST_SECONDS} s at least; not {interval!r}")
    if missed not in ("one", "all", "skip"):
        raise ValueError(f"missed is 'one', 'all' or 'skip'; not {missed!r}")
    if grace is not None and missed != "skip":
        raise ValueError("grace is how late a run may start: it needs missed='skip'")
    late = length / 10 if grace is None else seconds(grace, "grace")
    shift = seconds(offset, "offset", zero=True)
    return Timetable(round(length * MICRO), round(shift * MICRO), missed, round(late * MICRO))


class EveryRules(JobBase[K]):
    """When a job of either client is due, and its outcome when it is not due."""

    _prefix = "every/"

    def __init__(
        self, engine: Engine, key: str, options: LockOptions, plan: Plan, timetable: Timetable
    ) -> None:
        self._timetable = timetable
        super().__init__(engine, key, options, plan)

    def _now(self) -> int:
        return int(self._engine.runtime.wall() * MICRO)

    def _judge(self, recorded: RunRecord | None) -> Outcome | int:
        now = self._now()
        due = self._timetable.due(recorded, now)
        if due is not None:
            return due
        wait = self._timetable.next_seconds(recorded, now)
        if recorded is None:
            return Outcome(self.key, Status.SKIPPED, next_seconds=wait)
        return recorded.outcome(self.key)._replace(status=Status.SKIPPED, next_seconds=wait)

    def _busy(self, error: LockTimeout) -> Outcome:
        now = self._now()
        wait = (self._timetable.start(now) + self._timetable.interval - now) / MICRO
        return super()._busy(error)._replace(next_seconds=wait)

    def _ended(self, outcome: Outcome, recorded: RunRecord) -> Outcome:
        return outcome._replace(next_seconds=self._timetable.next_seconds(recorded, self._now()))
