"""A hold that is lost: broken through its own client, or while its block raises."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from dataclasses import dataclass
from uuid import uuid4

import pytest

import holdfast
from holdfast.claim import Record
from holdfast.core.breaking import note_name
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, LockLost


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


@pytest.mark.parametrize(
    "note",
    [
        "",
        "{",
        "[" * 100_000,
        "null",
        "[1, 2]",
        '["TOKEN", "host", "why"]',
        "[[TOKEN], 1, 2]",
        '[{"TOKEN": 1}, "host", "why"]',
        '[[1], "host", "why"]',
    ],
)
def test_a_note_that_is_not_ours_is_not_told(note: str) -> None:
    """Other programs may write the record: what can't be read, or is of another hold, is left."""
    url = _new()
    with holdfast.connect(url) as ours, holdfast.connect(url) as theirs:
        lease = ours.lock("name").acquire()
        assert lease
        assert theirs.break_lock("name", reason="the truth") == lease.token
        _record(theirs, note.replace("TOKEN", str(lease.token)))
        assert lease.release() is False
        assert lease.reason == "the store no longer had it"


def _record(locks: holdfast.Locks, text: str) -> None:
    hold = locks.lock(note_name("name")).acquire()
    assert hold
    assert run_now(locks._engine.backend.record(hold._hold.grant, text, 60.0))
    hold.release()


def test_a_note_is_cut_and_escaped() -> None:
    url = _new()
    with holdfast.connect(url) as ours, holdfast.connect(url) as theirs:
        lease = ours.lock("name").acquire()
        assert lease
        theirs.break_lock("name", reason="\x1b[2J" + "x" * 1000)
        assert lease.release() is False
        assert re.search(r"^it was broken by \S+ pid \d+: \\x1b\[2Jx{196}$", lease.reason)


def test_a_hold_is_broken_also_if_its_holder_can_t_be_told() -> None:
    """As while another client breaks the same name, and writes its own reason."""
    url = _new()
    with holdfast.connect(url) as ours, holdfast.connect(url) as theirs:
        lease = ours.lock("name").acquire()
        assert lease
        with theirs.lock(note_name("name")):
            assert theirs.break_lock("name", reason="a test") == lease.token
            assert ours.lock(note_name("name")).acquire(timeout=0) is None
        assert lease.release() is False
        assert lease.reason == "the store no longer had it"


def test_a_break_does_not_wait_for_long_until_its_reason_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang(*_: object) -> None:
        time.sleep(8)

    url = _new()
    with holdfast.connect(url) as ours, holdfast.connect(url) as theirs:
        lease = ours.lock("name").acquire()
        assert lease
        monkeypatch.setattr(theirs._engine.backend, "record", hang)
        began = time.monotonic()
        assert theirs.break_lock("name", reason="a test") == lease.token
        assert time.monotonic() - began < 5
        assert lease.release() is False


def test_a_loss_is_told_in_time_by_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the note takes a second at the most, however many holds are lost at once."""
    url = _new()

    async def hang(*_: object) -> None:
        time.sleep(30)

    with holdfast.connect(url, ttl=6) as ours, holdfast.connect(url) as theirs:
        leases = [ours.lock(f"name-{n}").acquire() for n in range(5)]
        for n in range(5):
            theirs.break_lock(f"name-{n}", reason="a test")
        monkeypatch.setattr(ours._engine.renewer.backend, "recall", hang)
        until = time.monotonic() + 2 + 1 + 2  # a third of the ttl, the second, and to spare
        while not all(lease and lease.lost for lease in leases):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert {lease.reason for lease in leases if lease} != {"its certain time is over"}


def test_a_block_asks_again_for_a_reason_that_came_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The renewer waits a quarter of a second for it: on a busy machine that may be too short."""
    url = _new()
    with holdfast.connect(url, ttl=3) as ours, holdfast.connect(url) as theirs:
        backend = ours._engine.renewer.backend
        slow = threading.Event()

        async def too_late(name: str) -> Record | None:
            slow.set()
            raise BackendUnavailable("too late")

        def body() -> None:
            with ours.lock("name") as lease:
                theirs.break_lock("name", reason="a test")
                assert slow.wait(30)
                _until_lost(lease)
                assert "a test" not in lease.reason
                monkeypatch.undo()

        monkeypatch.setattr(backend, "recall", too_late)
        with pytest.raises(LockLost, match="a test"):
            body()


def _until_lost(lease: holdfast.Lease) -> None:
    until = time.monotonic() + 30
    while not lease.lost:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_cancelled_release_has_lost_what_was_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled while it reads the note: the loss is told all the same."""
    url = _new()

    async def main() -> None:
        async with holdfast.connect_async(url) as ours, holdfast.connect_async(url) as theirs:
            lease = await ours.lock("name").acquire()
            assert lease
            await theirs.break_lock("name", reason="a test")
            reading = asyncio.Event()

            async def recall(*_: object) -> None:
                reading.set()
                await asyncio.sleep(30)

            monkeypatch.setattr(ours._engine.backend, "recall", recall)
            task = asyncio.create_task(lease.release())
            await reading.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert lease.lost
            assert lease.reason == "the store no longer had it"

    asyncio.run(main())
