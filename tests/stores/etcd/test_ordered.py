"""The rules that etcd and Consul share: which claim fits, which entry to wait for, which to
skip."""

from __future__ import annotations

import pytest

from holdfast.claim import Claim, Mode
from holdfast.core.contract import GRACE_SECONDS
from holdfast.core.ordered import (
    REMEMBERED,
    AbsentWaiters,
    Details,
    Entry,
    escape,
    judge,
    unescape,
)
from holdfast.errors import LimitMismatch
from holdfast.testing.contract.names import DISTINCT_NAMES

READER, WRITER, SLOTS = Mode.SHARED, Mode.EXCLUSIVE, Mode.SLOTS


def _entry(
    order: int,
    mode: Mode = WRITER,
    *,
    held: bool = False,
    weight: int = 1,
    slots: tuple[int, ...] = (),
) -> Entry:
    details = Details(order, weight, held, held, 0, 0.0, slots, "[]")
    limit = 3 if mode is SLOTS else 0
    return Entry(f"key {order}", f"owner {order}", order, order, "1", mode, limit, lambda: details)


def _claim(order: int, mode: Mode = WRITER, *, weight: int = 1, limit: int = 0) -> Claim:
    limit = limit or (3 if mode is SLOTS else 0)
    return Claim("name", mode, weight, limit, 30.0, f"owner {order}", "[]")


def test_a_writer_waits_for_the_last_entry_ahead() -> None:
    entries = [_entry(1, READER, held=True), _entry(2, READER, held=True), _entry(3), _entry(4)]
    verdict = judge(_claim(4), entries, "store")
    assert (verdict.fits, verdict.place, verdict.target) == (False, 1, "key 3")
    assert verdict.absent == ()


def test_a_reader_waits_for_the_last_writer_ahead() -> None:
    entries = [_entry(1, held=True), _entry(2, READER), _entry(3), _entry(4, READER), _entry(5)]
    assert judge(_claim(4, READER), entries, "store").target == "key 3"
    assert judge(_claim(2, READER), entries, "store").target == "key 1"


def test_readers_fit_together() -> None:
    entries = [_entry(1, READER, held=True), _entry(2, READER), _entry(3, READER), _entry(4)]
    assert judge(_claim(3, READER), entries, "store").fits
    assert not judge(_claim(4), entries, "store").fits
    assert not judge(_claim(5, READER), entries, "store").fits


def test_slots_are_the_lowest_free_ones() -> None:
    entries = [_entry(1, SLOTS, held=True, slots=(1,)), _entry(2, SLOTS, weight=2)]
    assert judge(_claim(2, SLOTS, weight=2), entries, "store").slots == (0, 2)


def test_a_claim_of_slots_waits_for_the_waiter_ahead_or_for_any_holder() -> None:
    entries = [
        _entry(1, SLOTS, held=True, weight=2, slots=(0, 1)),
        _entry(2, SLOTS, weight=2),
        _entry(3, SLOTS),
    ]
    assert judge(_claim(2, SLOTS, weight=2), entries, "store").target == ""
    assert judge(_claim(3, SLOTS), entries, "store").target == "key 2"


def test_another_kind_or_limit_is_refused() -> None:
    with pytest.raises(LimitMismatch, match="semaphore"):
        judge(_claim(9), [_entry(1, SLOTS, held=True)], "store")
    with pytest.raises(LimitMismatch, match="limit of 3"):
        judge(_claim(9, SLOTS, limit=4), [_entry(1, SLOTS, held=True)], "store")


def test_only_the_first_entries_of_a_long_queue_are_read() -> None:
    read: list[int] = []

    def lazy(order: int) -> Entry:
        entry = _entry(order, held=order == 0)
        details = entry.details

        def look() -> Details:
            read.append(order)
            return details

        return Entry(entry.key, entry.owner, order, order, "1", WRITER, 0, look)

    verdict = judge(_claim(500), [lazy(order) for order in range(500)], "store")
    assert (verdict.place, verdict.target) == (499, "key 499")
    assert read == [0, 1]


def test_each_absent_waiter_has_one_grace() -> None:
    absent, first, second = AbsentWaiters(), _entry(1), _entry(2)
    assert absent.judge([first], 100.0) == (None, GRACE_SECONDS)
    assert absent.judge([second], 101.0) == (None, GRACE_SECONDS)
    assert absent.judge([first], 100.0 + GRACE_SECONDS) == (first, None)
    assert absent.judge([], 200.0) == (None, None)


def test_entries_that_were_granted_cost_no_other_its_grace() -> None:
    """Of the absent waiters that are remembered, only the oldest are forgotten, and no more than
    needed."""
    absent, last = AbsentWaiters(), _entry(0)
    many = [_entry(order) for order in range(1, REMEMBERED + 2)]
    absent.judge(many, 100.0)
    absent.judge([last], 100.0)
    assert absent.judge([last], 100.0 + GRACE_SECONDS) == (last, None)
    assert absent.judge([many[0]], 200.0) == (None, GRACE_SECONDS)
    assert absent.judge([many[-1]], 200.0) == (many[-1], None)


def test_every_name_is_one_segment_and_is_read_back() -> None:
    segments = {escape(name) for name in DISTINCT_NAMES}
    assert len(segments) == len(DISTINCT_NAMES)
    for name in DISTINCT_NAMES:
        assert unescape(escape(name)) == name
        assert not set(escape(name)) & set('/.?# "\\')
