"""The rule by itself: what is refused, given what is remembered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import Fence, Mode, StaleFence
from holdfast.fencing import rule
from holdfast.fencing.rule import Memory, Stamp

EXCLUSIVE, SHARED, SLOTS = Mode.EXCLUSIVE, Mode.SHARED, Mode.SLOTS
Grant = tuple[Mode, tuple[int, ...]]


def fence(token: int, mode: Mode = EXCLUSIVE, *slots: int, epoch: int = 0) -> Fence:
    return Fence("lock", mode, slots, epoch, token)


def entered(*fences: Fence) -> Memory | None:
    memory = None
    for one in fences:
        assert rule.refusal(memory, one) is None, one
        memory = rule.enter(memory, one)
    return memory


def test_a_resource_that_knows_nobody_lets_everybody_in() -> None:
    for mode, slots in ((EXCLUSIVE, ()), (SHARED, ()), (SLOTS, (0, 3))):
        assert rule.refusal(None, fence(1, mode, *slots)) is None


def test_equal_is_let_in_and_lower_is_not() -> None:
    memory = entered(fence(5), fence(5))
    assert rule.refusal(memory, fence(4)) == fence(5)


def test_a_later_reader_keeps_an_earlier_writer_out() -> None:
    """Else the reader, on its next look, would see what was written after it had entered."""
    memory = entered(fence(3), fence(5, SHARED))
    assert rule.refusal(memory, fence(4)) == fence(5, SHARED)
    assert rule.refusal(memory, fence(4, SHARED)) is None


def test_entering_again_changes_nothing() -> None:
    for asked in (fence(5), fence(5, SHARED), fence(5, SLOTS, 1, 2)):
        memory = rule.enter(None, asked)
        assert rule.enter(memory, asked) is memory


def test_words_of_the_error() -> None:
    cases = {
        "a later holder, with token 9, has been here since": (fence(9), fence(8)),
        "a later reader, with token 9": (fence(9, SHARED), fence(8)),
        "a later holder in slot 2, with token 9": (fence(9, SLOTS, 2), fence(8, SLOTS, 2)),
        "a holder of the later epoch 1 (token 1) was here": (fence(1, epoch=1), fence(8)),
        "guarded by 'lock' as a lock, and can't be by it as a semaphore": (
            fence(9),
            fence(99, SLOTS, 0),
        ),
        "guarded by 'lock' as a semaphore, and can't be by it as a lock": (
            fence(9, SLOTS, 0),
            fence(99),
        ),
        "guarded by the lock 'lock', and this is another one: name the resource after its lock": (
            fence(9),
            Fence("other", EXCLUSIVE, (), 0, 99),
        ),
    }
    for words, (before, after) in cases.items():
        against = rule.refusal(entered(before), after)
        assert against is not None
        error = rule.stale("orders", after, against)
        assert isinstance(error, StaleFence)
        assert words in str(error)
        assert str(error).startswith("'orders' refused token ")
        assert (error.fence, error.highest) == (after, against)


def test_what_a_guard_takes() -> None:
    with holdfast.connect("memory://rule") as locks:
        with locks.lock("a") as lease:
            assert rule.as_fence(lease) == lease.fence == rule.as_fence(str(lease.fence))
        with locks.multi(["a", "b"]) as multi:
            with pytest.raises(TypeError, match=r"give one of \.leases"):
                rule.as_fence(multi)
            assert rule.as_fence(multi.leases["a"]).name == "a"


@st.composite
def lock_histories(draw: st.DrawFn) -> list[Fence]:
    """Grants of one lock in their order: tokens grow, readers may share a time."""
    fences, token, epoch = [], 0, 0
    for _ in range(draw(st.integers(1, 12))):
        token += draw(st.integers(1, 3))
        if draw(st.integers(0, 9)) == 0:
            epoch, token = epoch + 1, draw(st.integers(0, 3))
        fences.append(fence(token, draw(st.sampled_from([EXCLUSIVE, SHARED])), epoch=epoch))
    return fences


@given(lock_histories(), st.data())
def test_nobody_valid_is_refused_and_nobody_stale_let_in(
    grants: list[Fence], data: st.DataObject
) -> None:
    """Holders come whenever they like. A writer is stale once anybody later has entered, a reader
    once a later writer has."""
    memory: Memory | None = None
    seen: list[int] = []
    for _ in range(30):
        place = data.draw(st.integers(0, len(grants) - 1))
        asked = grants[place]
        later = [other for other in seen if other > place]
        if asked.mode is SHARED:
            later = [other for other in later if grants[other].mode is EXCLUSIVE]
        # Two grants may carry one stamp only across a change of epochs: it is no order then.
        against = rule.refusal(memory, asked)
        assert (against is not None) == bool(later)
        if against is None:
            memory = rule.enter(memory, asked)
            seen.append(place)


@given(st.lists(st.tuples(st.integers(0, 20), st.sets(st.integers(0, 3), min_size=1)), max_size=30))
def test_slots_do_not_disturb_each_other(asked: list[tuple[int, set[int]]]) -> None:
    memory: Memory | None = None
    highest: dict[int, Stamp] = {}
    for token, slots in asked:
        one = fence(token, SLOTS, *sorted(slots))
        stale = any(highest.get(slot, rule.NOBODY) > Stamp(0, token) for slot in slots)
        assert (rule.refusal(memory, one) is not None) == stale
        if not stale:
            memory = rule.enter(memory, one)
            highest |= dict.fromkeys(slots, Stamp(0, token))
