"""A hold that is lost: broken through its own client, or while its block raises."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from uuid import uuid4

import pytest

import holdfast
from holdfast.errors import LockLost


def _new() -> str:
    return f"memory://{uuid4().hex}"


def test_a_client_that_breaks_its_own_lock_loses_it_at_once() -> None:
    with holdfast.connect(_new()) as locks:
        lease = locks.lock("name").acquire()
        other = locks.lock("other").acquire()
        assert lease
        assert other
        reasons: list[str] = []
        assert locks.break_lock("name", reason="a\ntest") == lease.token
        lease.on_lost(reasons.append)
        assert lease.lost
        assert lease.reason == r"it was broken through its own client: a\ntest"
        assert other.held
        again = locks.lock("name").acquire(timeout=5)  # not AlreadyHeld
        assert again
        assert again.token > lease.token
        assert again.release() is True
        assert other.release() is True


def _break_and_raise(locks: holdfast.Locks, error: Exception) -> None:
    locks.break_lock("name", reason="test")
    raise error


async def _break_in_block(locks: holdfast.AsyncLocks, several: bool) -> None:
    async with locks.multi(["a", "name"]) if several else locks.lock("name"):
        await locks.break_lock("name", reason="test")
        raise ValueError("mine")


def _break_and_check(locks: holdfast.Locks, lease: holdfast.Lease) -> None:
    locks.break_lock("name", reason="test")
    lease.check()


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize("several", [False, True])
def test_the_error_of_a_block_tells_that_its_lock_was_lost(several: bool) -> None:
    with holdfast.connect(_new()) as locks:
        lock = locks.multi(["a", "name"]) if several else locks.lock("name")
        with pytest.raises(ValueError, match="mine") as caught, lock:
            _break_and_raise(locks, ValueError("mine"))
        (note,) = _notes(caught.value)
        assert note.startswith("the lock 'name' was lost: it was broken")
        with pytest.raises(ValueError, match="mine") as caught, lock:
            raise ValueError("mine")
        assert _notes(caught.value) == []


@pytest.mark.parametrize("several", [False, True])
def test_the_error_of_a_task_tells_that_its_lock_was_lost(several: bool) -> None:
    async def main() -> BaseException:
        async with holdfast.connect_async(_new()) as locks:
            with pytest.raises(ValueError, match="mine") as caught:
                await _break_in_block(locks, several)
            return caught.value

    (note,) = _notes(asyncio.run(main()))
    assert note.startswith("the lock 'name' was lost: it was broken")


def test_a_check_that_finds_the_loss_gets_no_note() -> None:
    with holdfast.connect(_new()) as locks:
        with pytest.raises(LockLost) as caught, locks.lock("name") as lease:
            _break_and_check(locks, lease)
        assert _notes(caught.value) == []


@dataclass(frozen=True)
class Frozen(Exception):
    """An error that can't be changed: it takes no note."""

    number: int = 1


def test_an_error_that_takes_no_note_is_raised_as_it_is() -> None:
    with holdfast.connect(_new()) as locks, pytest.raises(Frozen), locks.lock("name"):
        _break_and_raise(locks, Frozen())
