"""The simulated queue: against the theory of queues, against a real store, and what it advises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.bench.forkserver import ForkServer
from holdfast.bench.own_book import contenders
from holdfast.lab.estimate import Costs, Load, costs_of, estimate
from holdfast.lab.stores import STORES

NOTHING = Costs(0.0, 0.0)


@pytest.mark.parametrize(("steady", "factor"), [(False, 1.0), (True, 0.5)])
def test_waits_are_those_of_the_theory(steady: bool, factor: float) -> None:
    """A single line with random arrivals: M/M/1, and M/D/1 if all holds are as long."""
    rate, hold = 6.0, 0.1
    busy = rate * hold
    found = estimate(Load(rate, hold, 3000, steady=steady), NOTHING)
    mean = sum(found.waits) / len(found.waits)
    assert mean == pytest.approx(factor * busy * hold / (1 - busy), rel=0.15)
    assert found.utilisation == pytest.approx(busy, rel=0.05)
    assert found.holds_per_second == pytest.approx(rate, rel=0.05)


def test_a_line_is_served_in_order_and_slots_beside_each_other() -> None:
    one, four = (estimate(Load(30.0, 0.1, 100, limit=n), NOTHING) for n in (1, 4))
    assert one.utilisation == pytest.approx(1.0, abs=0.01)
    assert one.holds_per_second == pytest.approx(10.0, rel=0.05)
    assert four.holds_per_second == pytest.approx(30.0, rel=0.05)
    assert four.wait(0.99) < one.wait(0.5)


def test_who_gives_up_does_not_hold() -> None:
    found = estimate(Load(20.0, 0.1, 100, timeout=0.5), NOTHING)
    assert 0.3 < found.timed_out < 0.7
    assert found.wait(1.0) <= 0.5
    assert found.holds_per_second == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (Load(50.0, 0.12, 200), r"split it \(such as .* for less than 13\.\d ms, .* semaphore"),
        (Load(5000.0, 0.001, 200), "however short the holds: split it"),
        (Load(7.0, 0.12, 20, ttl=1.0, timeout=0.2), "give up: wait longer than 200 ms"),
        (Load(6.0, 0.13, 200, ttl=1.0), "Waits grow fast"),
        (Load(5.0, 0.02, 10), "After one crash nobody gets the lock for up to 31 s"),
        (Load(10.0, 0.01, 20_000), "After one crash nobody gets the lock for up to 31 s"),
        (Load(0.1, 0.5, 20_000), "This fits"),  # three requests
        (Load(10.0, 0.01, 20_000, limit=2), "This fits"),
        (Load(0.1, 0.005, 100, ttl=5.0), "may do without a lock"),
        (Load(0.1, 0.5, 100, ttl=5.0), "This fits"),
    ],
)
def test_advice(load: Load, says: str) -> None:
    assert re.search(says, estimate(load, costs_of("redis")).advice())


def test_a_crash() -> None:
    found = estimate(Load(2.0, 0.1, 200, ttl=10.0), NOTHING)
    assert (found.blocked_seconds, found.backlog) == (11.0, 22)
    assert found.drain_seconds == pytest.approx(22 / 8)
    assert estimate(Load(20.0, 0.1, 200), NOTHING).drain_seconds is None


def test_who_gives_up_after_a_crash_does_not_wait() -> None:
    found = estimate(Load(10.0, 0.01, 200, timeout=1.0), costs_of("redis"))
    assert (found.blocked_seconds, found.backlog, found.crash_timed_out) == (31.0, 10, 300)
    few = estimate(Load(10.0, 0.01, 5, timeout=1.0), costs_of("redis"))
    assert (few.backlog, few.crash_timed_out) == (5, 150)
    none = estimate(Load(10.0, 0.01, 5, timeout=0.0), costs_of("redis"))
    assert (none.backlog, none.crash_timed_out) == (0, 310)
    patient = estimate(Load(10.0, 0.01, 200, timeout=60.0), costs_of("redis"))
    assert (patient.backlog, patient.crash_timed_out) == (200, 0)


def test_an_advisory_lock_of_a_killed_process_ends_with_its_connection() -> None:
    found = estimate(Load(10.0, 0.01, 200), costs_of("postgres-advisory"))
    assert (found.blocked_seconds, found.backlog) == (1.0, 10)


@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("local", "sqlite"),
        ("postgresql", "postgres"),
        ("postgresql-advisory", "postgres-advisory"),
        ("mysql-advisory", "mysql-advisory"),
    ],
)
def test_a_store_is_also_known_by_its_url(name: str, store: str) -> None:
    (facts,) = [facts for facts in STORES if name in facts.names]
    assert facts.store == store
    assert costs_of(name) == costs_of(store)


def test_an_unknown_store_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match=r"'cassandra': one of memory, sqlite.*; --url measures"):
        costs_of("cassandra")


def test_it_comes_near_a_real_store(tmp_path: Path) -> None:
    """Four processes that sleep for most of the time: what they get is decided by the queue."""
    processes, hold, pause = 4, 0.02, 0.06
    target = [f"sqlite:///{tmp_path}/locks.db", [], "holdfast"]
    with ForkServer("holdfast.bench.own_book") as forkserver:
        real = forkserver.run(
            "contended",
            allowed=60,
            contender=contenders()[0].key,
            target=target,
            processes=processes,
            seconds=4.0,
            hold_seconds=hold,
            pause_seconds=pause,
            locks=1,
        )
    costs = costs_of("sqlite")
    rate = processes / (hold + pause + costs.free)
    found = estimate(Load(rate, hold, processes, steady=True), costs)
    assert found.holds_per_second == pytest.approx(real["holds_per_second"], rel=0.35)
