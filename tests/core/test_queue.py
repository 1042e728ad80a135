"""Admission as values: what no store shows by itself."""

from __future__ import annotations

import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.contract import GRACE_SECONDS, STALE_SECONDS
from holdfast.core.queue import MICROS, NameState
from holdfast.errors import LimitMismatch

GRACE, STALE, TTL = (int(seconds * MICROS) for seconds in (GRACE_SECONDS, STALE_SECONDS, 30.0))
_owners = iter(range(1_000_000))


def claim(mode: Mode = Mode.EXCLUSIVE, weight: int = 1, limit: int = 0) -> Claim:
    return Claim("name", mode, weight, limit, 30.0, f"owner {next(_owners)}", '["h",1,"t",""]')


def attempt(state: NameState[None], asked: Claim, now: int) -> Grant | Busy:
    return state.attempt(asked, now, join=True, wall=now)


def test_a_busy_answer_counts_the_reservation_that_it_has_made() -> None:
    """The hold is over and nobody has noticed: whoever asks next is told when to ask again."""
    state: NameState[None] = NameState("name", "store")
    first = claim()
    attempt(state, claim(), 0)
    attempt(state, first, TTL - STALE + 1)
    answer = attempt(state, claim(), TTL)
    assert answer == Busy(1, GRACE_SECONDS)
    assert [queued.claim for queued in state.woken] == [first]


def test_a_refused_exchange_ends_nothing() -> None:
    state: NameState[None] = NameState("name", "store")
    reader = claim(Mode.SHARED)
    for asked in (reader, claim(Mode.SHARED)):
        assert isinstance(attempt(state, asked, 0), Grant)
    with pytest.raises(LimitMismatch):
        state.exchange(reader.owner, claim(Mode.SLOTS, 1, 3), 1, wall=1)
    assert state.is_held_by(reader.owner, 1)


def test_an_exchange_may_change_the_kind_of_a_name_that_nobody_else_uses() -> None:
    state: NameState[None] = NameState("name", "store")
    writer = claim()
    attempt(state, writer, 0)
    ours, answer = state.exchange(writer.owner, claim(Mode.SLOTS, 1, 3), 1, wall=1)
    assert ours
    assert isinstance(answer, Grant)


def test_a_skewed_clock_ends_a_hold_later() -> None:
    state: NameState[None] = NameState("name", "store")
    state.skew = MICROS
    held = claim()
    attempt(state, held, 0)
    assert state.is_held_by(held.owner, TTL + MICROS - 1)
    assert attempt(state, claim(), TTL) == Busy(0, 1.0)
    assert not state.is_held_by(held.owner, TTL + MICROS)


def test_looking_changes_nothing() -> None:
    state: NameState[None] = NameState("name", "store")
    attempt(state, claim(), 0)
    state.changed = False
    assert state.info(TTL).holders == ()
    assert state.holds
    assert not state.changed
