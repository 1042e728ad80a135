"""What every guard does, whatever it guards."""

from __future__ import annotations

import random

import pytest

from fencing.accounts import Account
from holdfast import Fence, Mode, StaleFence
from holdfast.fencing import rule
from holdfast.fencing.rule import Memory


def fence(token: int, mode: Mode = Mode.EXCLUSIVE, *slots: int, epoch: int = 0) -> Fence:
    return Fence("order:42", mode, slots, epoch, token)


class WriteOnly(Account):
    """The mutant: a guard that looks at writes alone."""

    def __init__(self, inner: Account) -> None:
        self.inner = inner

    def read(self, fence: Fence) -> int:
        return self.inner.peek()

    def write(self, fence: Fence, value: int) -> None:
        self.inner.write(fence, value)

    def peek(self) -> int:
        return self.inner.peek()


def lost_update(account: Account) -> tuple[int, int]:
    """The schedule that fencing is for: A pauses between its read and its write, B is granted the
    lock and reads before A goes on. How many deposits were accepted, and the sum."""
    accepted = 0
    a, b = fence(33), fence(34)
    of_a = account.read(a)
    of_b = account.read(b)
    try:
        account.write(a, of_a + 1)
        accepted += 1
    except StaleFence:
        pass
    account.write(b, of_b + 1)
    accepted += 1
    return accepted, account.peek()


def test_no_update_is_lost(account: Account) -> None:
    assert lost_update(account) == (1, 1)


def test_fencing_writes_alone_loses_one(account: Account) -> None:
    """The mutant is caught: two deposits were accepted, and one is gone."""
    accepted, total = lost_update(WriteOnly(account))
    assert accepted == 2
    assert total == 1


def test_a_lower_fence_is_refused_and_an_equal_one_is_not(account: Account) -> None:
    account.write(fence(10), 1)
    account.write(fence(10), 2)
    account.write(fence(12), 3)
    with pytest.raises(StaleFence) as caught:
        account.write(fence(11), 4)
    assert account.peek() == 3
    assert caught.value.fence == fence(11)
    assert caught.value.highest is not None
    assert caught.value.highest.token == 12
    answer = str(caught.value)
    assert "token 11" in answer
    assert "token 12" in answer
    assert "order:42" in answer
    assert "account" in answer


def test_readers_come_in_any_order(account: Account) -> None:
    account.write(fence(10), 5)
    assert account.read(fence(13, Mode.SHARED)) == 5
    assert account.read(fence(12, Mode.SHARED)) == 5
    assert account.read(fence(13, Mode.SHARED)) == 5
    with pytest.raises(StaleFence):
        account.read(fence(9, Mode.SHARED))
    with pytest.raises(StaleFence, match="reader"):
        account.write(fence(12), 6)  # a reader that came later must not see this
    account.write(fence(14), 7)
    for stale in (12, 13):
        with pytest.raises(StaleFence):
            account.read(fence(stale, Mode.SHARED))


def test_slots_are_fenced_one_by_one(account: Account) -> None:
    account.write(fence(20, Mode.SLOTS, 0), 1)
    account.write(fence(21, Mode.SLOTS, 1, 2), 2)
    account.write(fence(20, Mode.SLOTS, 0), 3)  # older, and still valid
    account.write(fence(22, Mode.SLOTS, 0, 3), 4)
    for stale in (fence(20, Mode.SLOTS, 0), fence(20, Mode.SLOTS, 0, 5)):
        with pytest.raises(StaleFence, match="slot 0"):
            account.write(stale, 5)
    account.write(fence(21, Mode.SLOTS, 1, 2), 6)


def test_another_lock_is_refused(account: Account) -> None:
    account.write(fence(10), 1)
    other = Fence("order:43", Mode.EXCLUSIVE, (), 9, 99)
    with pytest.raises(StaleFence, match="guarded by the lock 'order:42'"):
        account.write(other, 2)
    with pytest.raises(StaleFence, match="guarded by the lock 'order:42'"):
        account.read(Fence("order:43", Mode.SHARED, (), 9, 99))


def test_a_lock_is_no_semaphore(account: Account) -> None:
    account.write(fence(10), 1)
    with pytest.raises(StaleFence, match="as a lock"):
        account.write(fence(99, Mode.SLOTS, 0), 2)


def test_a_semaphore_is_no_lock(account: Account) -> None:
    account.write(fence(10, Mode.SLOTS, 3), 1)
    for mode in (Mode.EXCLUSIVE, Mode.SHARED):
        with pytest.raises(StaleFence, match="as a semaphore"):
            account.write(fence(99, mode), 2)


def test_epochs_come_first(account: Account) -> None:
    account.write(fence(500), 1)
    account.write(fence(3, epoch=1), 2)
    with pytest.raises(StaleFence, match="epoch 1"):
        account.write(fence(501), 3)
    account.write(fence(4, epoch=1), 4)


def test_numbers_of_63_bits(account: Account) -> None:
    top = 2**63 - 1
    account.write(fence(top - 1), 1)
    account.write(fence(top), 2)
    with pytest.raises(StaleFence):
        account.write(fence(top - 1), 3)
    with pytest.raises(ValueError, match="a token is from 0 to 9223372036854775807"):
        account.write(fence(top + 1), 3)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("semaphore", [False, True], ids=["lock", "semaphore"])
def test_it_is_the_rule(account: Account, seed: int, semaphore: bool) -> None:
    """Whatever comes in whatever order: the guard says what ``fencing.rule`` says."""
    draw = random.Random(seed)
    memory: Memory | None = None
    for step in range(60):
        if semaphore:
            slots = tuple(sorted(draw.sample(range(4), draw.choice([1, 1, 2]))))
            asked = fence(draw.randrange(1, 30), Mode.SLOTS, *slots, epoch=draw.randrange(2))
        else:
            mode = draw.choice([Mode.EXCLUSIVE, Mode.SHARED])
            asked = fence(draw.randrange(1, 30) + step // 2, mode, epoch=draw.randrange(30) // 29)
        against = rule.refusal(memory, asked)
        if against is None:
            memory = rule.enter(memory, asked)
            account.write(asked, step)
            assert account.peek() == step
        else:
            with pytest.raises(StaleFence) as caught:
                account.write(asked, step)
            assert caught.value.highest == against
