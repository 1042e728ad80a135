"""What a reader knows, and what it does not claim to know."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from holdfast import Finding, Holder, LockInfo, Mode, Waiter
from holdfast.dashboard.rows import Row
from holdfast.dashboard.view import Query, View
from holdfast.dashboard.watch import (
    CHECK_SECONDS,
    INTERVAL_SECONDS,
    MOST_CHANGES,
    MOST_NAMES,
    STALE_SECONDS,
    Watch,
)


class Seen:
    """A watch in virtual time, two seconds from one reading to the next."""

    def __init__(self) -> None:
        self.at = 0.0
        self.watch = Watch(lambda: self.at, lambda: 1_000_000 + self.at)

    def read(self, *infos: LockInfo, after: float = 2.0) -> None:
        self.at += after
        self.watch.read(infos, self.at)

    def told(self) -> list[tuple[str, str]]:
        return [(change.what, change.name) for change in self.watch.changes]


def hold(name: str, left: float, token: int = 5, pid: int = 7) -> LockInfo:
    holder = Holder("web-1", pid, "main", "", "", "", Mode.EXCLUSIVE, token, (), 999_990, left)
    return LockInfo(name, 0, (holder,), ())


def test_a_hold_that_ran_out_is_lost() -> None:
    seen = Seen()
    for left in (6.0, 4.0, 2.0):
        seen.read(hold("a", left))
    seen.read()
    assert seen.told() == [("lost", "a")]
    assert seen.watch.counts == {"lost": 1, "broken": 0, "ended": 0}
    assert "web-1 pid 7 (main)" in seen.watch.changes[0].detail


def test_a_hold_that_ran_out_and_was_granted_to_another_is_lost() -> None:
    seen = Seen()
    for left in (6.0, 4.0, 2.0):
        seen.read(hold("a", left))
    seen.read(hold("a", 6.0, token=6, pid=8))
    assert seen.told() == [("lost", "a")]


@pytest.mark.parametrize(
    ("lefts", "after"),
    [
        ((6.0, 6.0, 6.0), 2.0),  # gone before its time
        ((6.0, 4.0), 2.0),
        ((6.0, 4.0, 2.5), 2.0),  # it would have lasted for another half second
        ((2.0,), 2.0),  # seen once: its ttl is not known
        ((30.0, 29.0), 300.0),  # not read for minutes: renewed meanwhile, who knows
        ((math.inf, math.inf), 2.0),  # an advisory lock
        ((math.nan,), 2.0),
    ],
)
def test_what_ended_otherwise_is_only_counted(lefts: tuple[float, ...], after: float) -> None:
    seen = Seen()
    for left in lefts:
        seen.read(hold("a", left))
    seen.read(after=after)
    assert seen.watch.counts == {"lost": 0, "broken": 0, "ended": 1}


def test_a_hold_that_is_renewed_late_is_not_lost() -> None:
    seen = Seen()
    for left in (6.0, 4.0, 2.0, 6.0, 6.0):
        seen.read(hold("a", left))
    seen.read()
    assert seen.watch.counts["lost"] == 0


def test_a_break_is_told_once_and_is_no_loss() -> None:
    seen = Seen()
    for left in (6.0, 4.0, 1.0):
        seen.read(hold("a", left))
    seen.watch.broke("a", hold("a", 1.0).holders, "host is gone")
    seen.read()
    assert seen.told() == [("broken", "a")]
    assert seen.watch.counts == {"lost": 0, "broken": 1, "ended": 0}
    assert seen.watch.changes[0].detail.endswith(": host is gone")


def test_an_outage_has_a_beginning_and_an_end() -> None:
    seen = Seen()
    seen.read(hold("a", 6.0))
    for _ in range(3):
        seen.at += 2
        seen.watch.failed(ConnectionError("refused"))
    assert seen.watch.error == "refused"
    assert seen.watch.age_seconds == 6
    seen.read()
    assert seen.told() == [("unreachable", ""), ("reachable", "")]
    assert seen.watch.error == ""


def test_after_an_outage_the_store_is_checked_at_once() -> None:
    """What the check found while the store was away is not true any more."""
    seen = Seen()
    seen.read()
    seen.watch.failed(ConnectionError("refused"))
    seen.watch.check_failed(ConnectionError("refused"))
    seen.at += 2
    assert not seen.watch.check_is_due
    seen.read()
    assert seen.watch.check_is_due


def test_an_error_without_a_text_is_an_error() -> None:
    seen = Seen()
    seen.watch.failed(TimeoutError())
    assert seen.watch.error == "TimeoutError"


def test_a_long_time_without_a_reading_is_told() -> None:
    seen = Seen()
    seen.read()
    seen.read(after=31)
    assert seen.told() == [("unwatched", "")]


def test_age_and_staleness() -> None:
    seen = Seen()
    assert seen.watch.age_seconds is None
    assert not seen.watch.is_stale
    seen.read()
    seen.at += STALE_SECONDS
    assert not seen.watch.is_stale
    seen.at += 0.1
    assert seen.watch.is_stale


def test_what_is_shown_ages_until_the_next_reading() -> None:
    seen = Seen()
    waiter = Waiter("web-2", 8, "main", "", "", "", Mode.EXCLUSIVE, 999_995, 0)
    election = hold("leader:a", math.inf)
    seen.read(hold("a", 30.0)._replace(waiters=(waiter,)), election, after=0)
    view, shown = View(seen.watch, "redis://cache"), []
    for _ in range(3):
        data = view.data(Query(sort="name"), can_break=False)
        row, other = data["rows"]
        (holder,) = row["holders"]
        shown.append((row["wait"], row["held"], row["left"], holder["since"], holder["left"]))
        assert data["totals"]["longest_wait"] == row["wait"]
        assert (other["held"], other["left"]) == (row["held"], None)
        seen.at += 20
    assert shown == [(5, 10, 30, 10, 30), (25, 30, 10, 30, 10), (45, 50, 0, 50, 0)]


class Once(tuple[Row, ...]):
    """Rows that are not to be gone through."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Row]:
        raise AssertionError("all names were gone through")


def test_viewers_go_through_the_names_once_for_each_reading() -> None:
    """Two hundred viewers of twenty thousand names would keep the event loop busy."""
    seen = Seen()
    seen.read(hold("leader:a", 3.0), hold("b", 3.0))
    view = View(seen.watch, "redis://cache")
    queries = [Query(), Query(tree=True), Query(filter="b")]
    first = [view.data(query, can_break=False) for query in queries]
    seen.watch.rows = Once(seen.watch.rows)
    assert [view.data(query, can_break=False) for query in queries] == first


def test_a_slow_store_is_read_for_half_of_the_time_at_most() -> None:
    seen = Seen()
    seen.watch.read((), seen.at)
    assert seen.watch.pause_seconds == INTERVAL_SECONDS
    began = seen.at
    seen.at += 7
    seen.watch.read((), began)
    assert seen.watch.pause_seconds == 7
    seen.watch.failed(ConnectionError("refused"))
    assert seen.watch.pause_seconds == INTERVAL_SECONDS


def test_of_too_many_names_nothing_is_said_to_have_ended() -> None:
    """Other ones may be read each time."""
    seen, truncated = Seen(), []
    many = [hold(f"n{n}", 6.0) for n in range(MOST_NAMES + 1)]
    for infos in (many, [*many[1:], hold("other", 6.0)], [hold("a", 6.0)]):
        seen.read(*infos)
        truncated.append((seen.watch.truncated, len(seen.watch.rows)))
    assert truncated == [(True, MOST_NAMES), (True, MOST_NAMES), (False, 1)]
    assert seen.watch.counts["ended"] == 0


def test_changes_are_bounded() -> None:
    seen = Seen()
    seen.watch.broke("a", hold("a", 1.0).holders * (MOST_CHANGES + 50), "x")
    assert len(seen.watch.changes) == MOST_CHANGES
    assert seen.watch.counts["broken"] == MOST_CHANGES + 50


def test_checks_are_due_now_and_then() -> None:
    seen = Seen()
    due = [seen.watch.check_is_due]
    seen.watch.checked([Finding("file", "private")])
    for seconds in (0, CHECK_SECONDS):
        seen.at += seconds
        due.append(seen.watch.check_is_due)
    assert due == [True, False, True]
    seen.watch.check_failed(ConnectionError("away"))
    assert (seen.watch.findings, seen.watch.check_error) == ((), "away")
