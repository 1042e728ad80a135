"""A fence's text: one form, bounded numbers, and nothing else is read."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import Fence, Mode
from holdfast.claim import check_name
from holdfast.fencing.rule import as_fence


def is_name(text: str) -> bool:
    try:
        return bool(check_name(text))
    except ValueError:
        return False


FENCES = st.builds(
    Fence,
    st.text(min_size=1, max_size=100).filter(is_name),
    st.sampled_from(Mode),
    st.lists(st.integers(0, 65_535), unique=True, max_size=20).map(tuple),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**63 - 1),
)


@given(FENCES)
def test_what_is_written_is_read_back(fence: Fence) -> None:
    assert Fence.parse(str(fence)) == fence
    assert pickle.loads(pickle.dumps(fence)) == fence


def test_the_largest_fence_fits() -> None:
    """What a lease can have is within the bounds of what is read."""
    slots = tuple(range(65_536 - 1024, 65_536))
    largest = Fence("\N{LOCK}" * 128, Mode.SLOTS, slots, 2**31 - 1, 2**63 - 1)
    assert Fence.parse(str(largest)) == largest


@pytest.mark.parametrize(
    "number",
    ["1_7", "+1", "-1", " 1", "1 ", "01", "00", "\u0661", "1.0", "0x1", "\uff11", "9" * 5000],
)
@pytest.mark.parametrize("form", ["1;slots;{};0;7;x", "1;exclusive;;{};7;x", "1;exclusive;;0;{};x"])
def test_a_number_has_one_spelling(form: str, number: str) -> None:
    with pytest.raises(ValueError, match="its form is 1;mode;slots;epoch;token"):
        Fence.parse(form.format(number))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"1;exclusive;;0;{2**63};x", "a token is from 0 to 9223372036854775807"),
        (f"1;exclusive;;{2**31};1;x", "epoch is a whole number from 0 to 2147483647"),
        ("1;slots;65536;0;1;x", "a slot is from 0 to 65535"),
        ("1;slots;3,4,3;0;1;x", "none of them twice"),
        (f"1;slots;{','.join(map(str, range(1025)))};0;1;x", "at most 1024 slots"),
        ("1;slots;1,;0;1;x", "its form is"),
        ("1;exclusive;;0;;x", "its form is"),
        ("1;slots;,1;0;1;x", "its form is"),
        ("1;exclusive;;0;1;", "can't be empty"),
        ("1;exclusive;;0;1;a%0Ab", "control characters"),
        ("1;exclusive;;0;1;%FF", "can't decode"),
        (f"1;exclusive;;0;1;{'x' * 513}", "at most 512 bytes"),
        ("1;exclusive;;0;1;" + "x" * 10_000, "longer than 9216 characters"),
        ("1;Exclusive;;0;1;x", "its form is"),
        ("2;exclusive;;0;1;x", "version 2"),
    ],
    ids=lambda text: text[:30],
)
def test_what_no_lease_can_have_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="not a fence") as caught:
        Fence.parse(text)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "fence",
    [
        Fence("x", Mode.EXCLUSIVE, (), 0, 2**63),
        Fence("x", Mode.EXCLUSIVE, (), 2**31, 1),
        Fence("x", Mode.EXCLUSIVE, (), 0, -1),
        Fence("x", Mode.SLOTS, (65_536,), 0, 1),
        Fence("x", Mode.SLOTS, (1, 1), 0, 1),
        Fence("x\n", Mode.EXCLUSIVE, (), 0, 1),
    ],
)
def test_a_guard_takes_no_such_fence_either(fence: Fence) -> None:
    """One that was put together by hand."""
    with pytest.raises(ValueError, match="not a fence"):
        as_fence(fence)


def test_only_text_is_parsed() -> None:
    with pytest.raises(TypeError, match="not bytes"):
        Fence.parse(b"1;exclusive;;0;1;x")  # type: ignore[arg-type]


@pytest.mark.parametrize("epoch", [-1, 2**31, 2**70, 1.0, True, "1", None])
@pytest.mark.parametrize("connect", [holdfast.connect, holdfast.connect_async])
def test_an_epoch_that_no_resource_could_remember(connect: object, epoch: object) -> None:
    with pytest.raises(ValueError, match="epoch is a whole number from 0 to 2147483647"):
        connect("memory://", epoch=epoch)  # type: ignore[operator]


def test_a_semaphore_has_no_more_slots_than_a_fence_can_name() -> None:
    with holdfast.connect("memory://limits") as locks:
        locks.semaphore("s", 65_536)
        with pytest.raises(ValueError, match=r"limit is a whole number from 1 to 65,536"):
            locks.semaphore("s", 65_537)
