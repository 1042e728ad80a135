"""Extending a hold: the certain end is never later than the stored end, also without an answer."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest

import holdfast
from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import Renewal
from holdfast.core.drive import run_now
from holdfast.core.hold import Change, Hold
from holdfast.core.queue import MICROS
from holdfast.errors import BackendUnavailable, HoldfastError, LockLost
from holdfast.io.clock import now
from holdfast.lease import AsyncLease, Lease
from holdfast.stores.memory import MemoryBackend

SOON = 10.0
Renew = Callable[..., Awaitable[Renewal]]


@pytest.fixture
def locks() -> Iterator[holdfast.Locks]:
    with holdfast.connect(f"memory://{time.monotonic_ns()}") as locks:
        yield locks
        for lease in _taken:
            lease.release()
    _taken.clear()


_taken: list[Lease] = []


def _take(locks: holdfast.Locks, ttl: float, *, renew: bool = True) -> Lease:
    lease = locks.lock("name", ttl=ttl, renew=renew).acquire()
    assert lease is not None
    _taken.append(lease)
    return lease


def _stored(backend: Any) -> float:
    """Seconds until the store ends the only hold."""
    assert isinstance(backend, MemoryBackend)
    (holder,) = run_now(backend.look("name")).holders
    return holder.remaining


def _wait_for(condition: Callable[[], object]) -> None:
    ends = now() + SOON
    while not condition():
        assert now() < ends
        time.sleep(0.002)


def _failing(backend: Any, *, lands: bool) -> Renew:
    """A backend whose answer, or the request itself, gets lost."""
    renew = backend.renew

    async def unanswered(*args: Any, **kwargs: Any) -> Renewal:
        if lands:
            await renew(*args, **kwargs)
        raise BackendUnavailable("no answer came")

    return unanswered


@pytest.mark.parametrize("lands", [True, False], ids=["landed", "lost"])
def test_a_shorter_ttl_that_is_not_answered_counts(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch, lands: bool
) -> None:
    """A longer ttl is then refused, since the late request may arrive at any time."""
    lease = _take(locks, 60, renew=False)
    backend = locks._engine.backend
    with monkeypatch.context() as patch:
        patch.setattr(backend, "renew", _failing(backend, lands=lands))
        with pytest.raises(BackendUnavailable):
            lease.extend(4)
    assert 0 < lease.remaining < 4 < _stored(backend) + 0.1
    assert lease.ttl == 4
    with pytest.raises(BackendUnavailable, match="may still arrive"):
        lease.extend(60)
    lease.extend()
    assert 0 < lease.remaining < min(4, _stored(backend))
    lease.extend(4)
    assert lease.remaining < _stored(backend) <= 4


def test_a_cancelled_extend_to_a_shorter_ttl_counts() -> None:
    async def use() -> None:
        async with holdfast.connect_async("memory://cancelled extend", ttl=60) as locks:
            lease = await locks.lock("name", renew=False).acquire()
            assert lease is not None
            backend: Any = locks._engine.backend
            renew, landed = backend.renew, asyncio.Event()

            async def slow(*args: Any, **kwargs: Any) -> None:
                await renew(*args, **kwargs)
                landed.set()
                await asyncio.sleep(60)

            backend.renew = slow
            extending = asyncio.create_task(lease.extend(4))
            await landed.wait()
            extending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await extending
            assert lease.remaining < _stored(backend) <= 4
            await lease.release()

    asyncio.run(use())


@pytest.mark.parametrize("lands", [True, False], ids=["landed", "lost"])
def test_a_longer_ttl_that_is_not_answered_does_not_count(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch, lands: bool
) -> None:
    lease = _take(locks, 30, renew=False)
    backend = locks._engine.backend
    with monkeypatch.context() as patch:
        patch.setattr(backend, "renew", _failing(backend, lands=lands))
        with pytest.raises(BackendUnavailable):
            lease.extend(60)
    assert 20 < lease.remaining < 30
    assert lease.ttl == 30
    assert _stored(backend) > (30 if lands else 20)
    lease.extend(30)  # it is to end sooner again where the other one landed
    assert lease.remaining < _stored(backend) <= 30
    lease.extend(60)
    assert 30 < lease.remaining < _stored(backend)


@pytest.mark.parametrize("ttl", [6, 60], ids=["shorter", "longer"])
def test_an_extend_that_is_not_answered_is_followed_by_a_renewal(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch, ttl: float
) -> None:
    """At once: a third of the old ttl may be too late for the shorter one."""
    lease = _take(locks, 30)
    backend = locks._engine.backend
    monkeypatch.setattr(backend, "renew", _failing(backend, lands=True))
    sent = now()
    with pytest.raises(BackendUnavailable):
        lease.extend(ttl)
    ends = lease._hold.ends
    _wait_for(lambda: lease._hold.ends > ends)
    assert now() - sent < 3
    assert lease.held


class _Busy:
    """Notes how many requests to extend or renew are under way at a time."""

    def __init__(self) -> None:
        self.now = self.most = self.calls = 0
        self._mutex = threading.Lock()

    def wrap(self, backend: Any, pause: Callable[[], Awaitable[None]]) -> None:
        renew = backend.renew

        async def counted(grants: Sequence[Grant], *args: Any, **kwargs: Any) -> Renewal:
            with self._mutex:
                self.now += 1
                self.calls += 1
                self.most = max(self.most, self.now)
            try:
                await pause()
                answer: Renewal = await renew(grants, *args, **kwargs)
                return answer
            finally:
                with self._mutex:
                    self.now -= 1

        backend.renew = counted


async def _pause_thread() -> None:
    time.sleep(0.02)


def test_threads_and_the_renewer_extend_one_at_a_time(locks: holdfast.Locks) -> None:
    lease = _take(locks, 3)
    busy, client = _Busy(), locks._engine
    busy.wrap(client.backend, _pause_thread)
    busy.wrap(client.renewer.backend, _pause_thread)
    ends = now() + 2

    def extend(*ttls: float) -> None:
        while now() < ends:
            for ttl in ttls:
                lease.extend(ttl)
                lease._hold.renew_at = 0.0  # the renewer has a reason to come, too
                client.renewer.plan(0.0)

    threads = [threading.Thread(target=extend, args=ttls) for ttls in [(60, 5), (5, 30)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert busy.calls > 20
    assert busy.most == 1
    assert lease.remaining < _stored(client.backend)
    assert lease.held


def test_tasks_extend_one_at_a_time() -> None:
    async def pause() -> None:
        await asyncio.sleep(0.02)

    async def use() -> None:
        async with holdfast.connect_async("memory://tasks extend", ttl=30) as locks:
            lease = await locks.lock("name").acquire()
            assert lease is not None
            busy, client = _Busy(), locks._engine
            busy.wrap(client.backend, pause)
            busy.wrap(client.renewer.backend, _pause_thread)
            for _ in range(5):
                await asyncio.gather(*(lease.extend(ttl) for ttl in (60, 5, 30, 4)))
            assert (busy.most, busy.calls) == (1, 20)
            assert lease.ttl == 4
            assert lease.remaining < _stored(client.backend) <= 4
            await lease.release()

    asyncio.run(use())


def test_an_extend_waits_for_a_renewal_that_is_under_way(locks: holdfast.Locks) -> None:
    """Else the renewal may arrive last, with the shorter ttl. No wait exceeds the certain time."""
    lease = _take(locks, 1)
    renewer: Any = locks._engine.renewer.backend
    renew = renewer.renew
    under_way, go_on = threading.Event(), threading.Event()

    async def held_up(*args: Any, **kwargs: Any) -> Renewal:
        under_way.set()
        assert go_on.wait(SOON)
        answer: Renewal = await renew(*args, **kwargs)
        return answer

    renewer.renew = held_up
    assert under_way.wait(SOON)
    asked: list[object] = []
    mine: Any = locks._engine.backend
    mine.renew = lambda *args, **kwargs: asked.append(args)
    try:
        with pytest.raises(LockLost):
            lease.extend(60)
        assert asked == []
    finally:
        go_on.set()


def test_a_signal_handler_that_extends_does_not_wait_for_itself(locks: holdfast.Locks) -> None:
    lease = _take(locks, 30)
    backend: Any = locks._engine.backend
    renew = backend.renew
    errors: list[BaseException] = []

    async def interrupted(*args: Any, **kwargs: Any) -> Renewal:
        with pytest.raises(HoldfastError, match="signal handler") as info:
            lease.extend(4)  # as a handler does that runs here
        errors.append(info.value)
        answer: Renewal = await renew(*args, **kwargs)
        return answer

    backend.renew = interrupted
    lease.extend(60)
    assert len(errors) == 1
    assert lease.ttl == 60
    backend.renew = renew
    lease.extend(40)


class _Interrupting:
    """Raises ``KeyboardInterrupt`` before a numbered line of the code that extends."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.endswith(("core/extend.py", "core/hold.py")):
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("ttl", [4, 60], ids=["shorter", "longer"])
def test_an_interrupt_anywhere_leaves_the_hold_as_certain_as_it_is_stored(
    locks: holdfast.Locks, ttl: float
) -> None:
    """Other threads can extend or renew it afterwards."""
    for line in range(200):
        with locks.lock(f"name {line}", ttl=30) as lease:
            interrupt = _Interrupting(line)
            sys.settrace(interrupt)
            try:
                lease.extend(ttl)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            if interrupt.left >= 0:
                assert line > 20
                return
            ledger = locks._engine.backend.ledger  # type: ignore[attr-defined]
            (held,) = ledger.names[lease.name].state.holds.values()
            assert lease._hold.ends < held.ends / MICROS
            assert not list(lease._hold.pending_changes()), f"line {line}"
            lease.extend()
            assert lease.held
    raise AssertionError("it never came to its end")


def test_an_interrupted_extend_blocks_no_renewal() -> None:
    hold = Hold(Grant(_claim(), 1), 0.0, True, None)
    torn, later = Change(), Change()
    assert hold.begin_change(torn)
    assert not hold.begin_change(later)
    del torn
    assert hold.is_first_change(later)


def _claim() -> Claim:
    return Claim("name", Mode.EXCLUSIVE, 1, 0, 30.0, "owner", "")


def test_an_answer_after_the_certain_time_does_not_revive_the_hold(locks: holdfast.Locks) -> None:
    lease = _take(locks, 0.2, renew=False)
    backend: Any = locks._engine.backend
    renew = backend.renew

    async def late(*args: Any, **kwargs: Any) -> Renewal:
        answer: Renewal = await renew(*args, **kwargs)
        time.sleep(0.3)
        return answer

    backend.renew = late
    with pytest.raises(LockLost):
        lease.extend(60)
    assert lease.lost
    assert lease.remaining == 0


def test_an_async_lease_can_be_extended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed extend, with the same ttl, any number of times."""

    async def use(lease: AsyncLease, backend: Any) -> None:
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(backend, "renew", _failing(backend, lands=False))
                with pytest.raises(BackendUnavailable):
                    await lease.extend()
            await lease.extend()
            assert 20 < lease.remaining < 30

    async def main() -> None:
        async with holdfast.connect_async("memory://again", ttl=30) as locks:
            lease = await locks.lock("name").acquire()
            assert lease is not None
            await use(lease, locks._engine.backend)
            await lease.release()

    asyncio.run(main())
