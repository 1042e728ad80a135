"""The judge of a contended run sees what is wrong in it."""

from __future__ import annotations

import pytest

from holdfast.bench.contended import Turn, judge
from holdfast.bench.figures import percentile


def turns(*spans: tuple[int, float, float]) -> list[Turn]:
    """Holds of these processes from and to these times, asked for at the start."""
    return [
        Turn(who, 0.0, held, ended, number + 1) for number, (who, held, ended) in enumerate(spans)
    ]


def test_a_clean_run() -> None:
    """Two who take turns: all handed over, perfectly fair, nothing at once."""
    row = judge(turns((0, 0.1, 0.2), (1, 0.3, 0.4), (0, 0.5, 0.6), (1, 0.7, 0.8)), 2, 0.0, 1.0)
    assert (row["holds"], row["overlaps"], row["sinking_tokens"]) == (4, 0, 0)
    assert row["fewest_to_most"] == 1.0
    assert row["switch_percent"] == 100.0
    assert row["handover_p50_us"] == pytest.approx(100_000)
    assert row["longest_wait_ms"] == pytest.approx(700)


def test_an_overlap_is_counted() -> None:
    """Whoever is granted before the one in front has ended shared the lock."""
    assert judge(turns((0, 0.1, 0.3), (1, 0.2, 0.4)), 2, 0.0, 1.0)["overlaps"] == 1


def test_each_lock_has_its_own_line() -> None:
    """Who holds another lock at the same time, with a token below, shares nothing."""
    at_once = turns((1, 0.1, 0.3), (0, 0.2, 0.4), (3, 0.35, 0.5), (2, 0.45, 0.6))
    sunk = [turn._replace(token=9 - turn.token % 2) for turn in at_once]
    row = judge(at_once, 4, 0.0, 1.0, locks=2)
    assert (row["overlaps"], row["switch_percent"]) == (0, 100.0)
    assert judge(at_once, 4, 0.0, 1.0)["overlaps"] == 3
    assert judge(sunk, 4, 0.0, 1.0, locks=2)["sinking_tokens"] == 2


def test_tokens_that_do_not_grow_are_counted() -> None:
    """A repeated token is as bad as a lower one; contenders without tokens have none to judge."""
    one = Turn(0, 0.0, 0.1, 0.2, 7)
    assert judge([one, Turn(1, 0.0, 0.3, 0.4, 7)], 2, 0.0, 1.0)["sinking_tokens"] == 1
    assert (
        judge([one._replace(token=0), Turn(1, 0.0, 0.3, 0.4, 0)], 2, 0.0, 1.0)["sinking_tokens"]
        == 0
    )


def test_who_starves_is_seen() -> None:
    """A hold that came only after the end does not count, but the wait until the end does."""
    late = Turn(1, 0.1, 1.5, 1.6, 9)
    row = judge([*turns((0, 0.1, 0.2), (0, 0.3, 0.4)), late], 2, 0.0, 1.0)
    assert (row["fewest"], row["most"], row["fewest_to_most"]) == (0, 2, 0.0)
    assert row["longest_wait_ms"] == pytest.approx(900)
    assert row["switch_percent"] == 0.0


def test_percentiles() -> None:
    """The middle, the end, and nothing of nothing."""
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.5) == 51.0
    assert percentile(values, 0.99) == 100.0
    assert percentile([], 0.5) is None
