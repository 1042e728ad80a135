"""A job runs once per interval, however wrong the clocks of the hosts are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import Locks
from holdfast.claim import Record
from holdfast.primitives.every import Timetable, make_timetable
from holdfast.primitives.once_outcome import RunRecord
from holdfast.testing.conformance.bench import calmly
from primitives.conftest import Bench

MICRO = 1_000_000


class Host:
    """A client whose host's clock is wrong by so many seconds."""

    def __init__(self, name: str, clock: Callable[[], float], skew: float = 0.0) -> None:
        self.locks: Locks = holdfast.connect(f"memory://{name}")
        self.locks._engine.runtime.wall = lambda: clock() + skew  # type: ignore[method-assign]


class Fleet:
    """Hosts that share a store, and the true time."""

    def __init__(self, name: str, *skews: float) -> None:
        self.now = 1_700_000_000.0
        self.hosts = [Host(name, lambda: self.now, skew) for skew in skews]

    def close(self) -> None:
        for host in self.hosts:
            host.locks.close()


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Any:
    made = Fleet(request.function.__name__, *getattr(request, "param", (0.0,)))
    yield made
    made.close()


class Aging:
    """A store whose records have a given age."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.age_seconds = 0.0

    def __getattr__(self, word: str) -> Any:
        return getattr(self._inner, word)

    async def recall(self, name: str) -> Record | None:
        record: Record | None = await self._inner.recall(name)
        return None if record is None else record._replace(age_seconds=self.age_seconds)


def test_runs_once_per_interval(bench: Bench) -> None:
    async def body() -> None:
        first, second = bench.client(), bench.client()
        runs: list[datetime] = []

        def work(due: datetime) -> int:
            runs.append(due)
            return len(runs)

        job = first.every(3600, "report")
        ours = await job.run(work)
        theirs = await second.every(3600, "report").run(work)
        if theirs.ran:  # the hour has changed in between
            ours, theirs = theirs, await job.run(work)
        assert (ours.ran, ours.status) == (True, "done")
        assert (theirs.ran, theirs.status, theirs.value) == (False, "skipped", ours.value)
        assert theirs.next_seconds is not None
        assert 0 < theirs.next_seconds <= 3600
        assert runs[-1].tzinfo is UTC
        assert runs[-1].timestamp() % 3600 == 0

    bench.run(body)


def test_a_running_job_is_skipped_or_waited_for(bench: Bench) -> None:
    async def body() -> None:
        client = bench.client()
        async with client.lock("every/report"):
            skipped = await bench.client().every(3600, "report").run(lambda: 1)
            assert skipped.status == "skipped"
            assert skipped.next_seconds is not None
            other = bench.client()
            with pytest.raises(holdfast.LockTimeout):
                await calmly(
                    lambda s: other.every(3600, "report", wait=True, timeout=s).run(lambda: 1)
                )

    bench.run(body)


def test_a_recorded_error_waits_for_the_next_interval(fleet: Fleet) -> None:
    def fail() -> None:
        raise ValueError("broken")

    job = fleet.hosts[0].locks.every(60, "report")
    with pytest.raises(ValueError, match="broken"):
        job.run(fail)
    skipped = job.run(lambda: 1)
    assert (skipped.status, skipped.error) == ("skipped", "ValueError: broken")
    fleet.now += 60
    assert job.run(lambda: 1).ran


def test_a_retried_error_does_not_wait(fleet: Fleet) -> None:
    def fail() -> None:
        raise ValueError("broken")

    job = fleet.hosts[0].locks.every(60, "report", errors="retry")
    with pytest.raises(ValueError, match="broken"):
        job.run(fail)
    outcome = job.run(lambda: 1)
    assert (outcome.ran, outcome.attempt) == (True, 2)
    assert not job.run(lambda: 1).ran


@pytest.mark.parametrize("fleet", [(0.0, 30.0, -30.0, 59.0, -59.0)], indirect=True)
def test_skewed_clocks_run_no_interval_twice(fleet: Fleet) -> None:
    runs: Counter[datetime] = Counter()

    def work(due: datetime) -> None:
        runs[due] += 1

    for _ in range(600):
        for host in fleet.hosts:
            host.locks.every(60, "report").run(work)
        fleet.now += 1
    assert set(runs.values()) == {1}
    assert 9 <= len(runs) <= 12


def test_a_clock_that_was_far_ahead_does_not_stop_the_job(fleet: Fleet) -> None:
    locks = fleet.hosts[0].locks
    store: Any = Aging(locks._engine.backend)
    locks._engine.backend = store
    job = locks.every(60, "report")
    fleet.now += 10 * 366 * 24 * 3600
    assert job.run(lambda: 1).ran
    fleet.now -= 10 * 366 * 24 * 3600
    store.age_seconds = 59.9  # the age of a record comes from the store's clock
    assert not job.run(lambda: 1).ran
    store.age_seconds = 60.0
    assert job.run(lambda: 1).ran
    store.age_seconds = 0.0
    assert not job.run(lambda: 1).ran


def test_missed_intervals_by_policy(fleet: Fleet) -> None:
    locks = fleet.hosts[0].locks
    runs: dict[str, list[int]] = {"one": [], "all": [], "skip": []}

    def step() -> None:
        for missed, seen in runs.items():
            job = locks.every(60, missed, missed=missed)  # type: ignore[arg-type]
            for _ in range(10):
                outcome = job.run(lambda due, seen=seen: seen.append(int(due.timestamp())))
                assert outcome.next_seconds is not None
                if outcome.next_seconds > 0:
                    break

    fleet.now = start = 1_700_000_040.0
    step()
    fleet.now += 5 * 60 + 30  # four intervals were missed, and this one is half over
    step()
    assert runs["one"] == [start, start + 300]
    assert runs["all"] == [start + n * 60 for n in range(6)]
    assert runs["skip"] == [start]
    fleet.now += 31
    step()
    assert [seen[-1] for seen in runs.values()] == [start + 360] * 3


def test_offset_moves_the_intervals(fleet: Fleet) -> None:
    job = fleet.hosts[0].locks.every(24 * 3600, "nightly", offset=2 * 3600)
    seen: list[datetime] = []

    def work(due: datetime) -> None:
        seen.append(due)

    job.run(work)
    assert (seen[0].hour, seen[0].minute) == (2, 0)


def test_a_crashed_run_is_taken_over(fleet: Fleet) -> None:
    locks = fleet.hosts[0].locks

    def die() -> None:
        raise KeyboardInterrupt

    job = locks.every(60, "report")
    with pytest.raises(KeyboardInterrupt):
        job.run(die)
    outcome = job.run(lambda: 1)
    assert (outcome.ran, outcome.attempt) == (True, 2)
    assert outcome.took_over is not None


def test_another_interval_goes_on_from_where_the_first_was(fleet: Fleet) -> None:
    locks = fleet.hosts[0].locks
    fleet.now = 1_700_000_100.0
    assert locks.every(60, "report").run(lambda: 1).ran
    assert not locks.every(3600, "report").run(lambda: 1).ran
    fleet.now += 3600
    assert locks.every(3600, "report").run(lambda: 1).ran


@settings(max_examples=300)
@given(
    skews=st.lists(st.integers(-10_000, 10_000), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2000)), max_size=60),
    missed=st.sampled_from(["one", "all", "skip"]),
)
def test_no_schedule_runs_an_interval_twice(
    skews: list[int], steps: list[tuple[int, int]], missed: Any
) -> None:
    """Hosts run in any order, each with its own clock: the due interval only moves forward."""
    table: Timetable = make_timetable(1, 0, missed, None)
    now, recorded = 1_700_000_000 * MICRO, None
    last, written = 0, now
    for host, passed in steps:
        now += passed * 1000
        if recorded is not None:
            recorded = recorded._replace(age_seconds=(now - written) / MICRO)
        clock = now + skews[host % len(skews)] * 1000
        due = table.due(recorded, clock)
        assert table.next_seconds(recorded, clock) >= 0
        if due is None:
            continue
        assert due > last
        last, written = due, now
        recorded = RunRecord("done", 1, 0.0, finished=due, due=due)
