"""Virtual time and faults: what a test sees in its own thread, in other threads and in tasks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

import holdfast
from holdfast.testing import virtual
from holdfast.testing.virtual import FaultStore, LockFaults, VirtualClock

QUICK_SECONDS = 20.0
"""Real time that hours of virtual time may take, on a busy machine."""


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def store(clock: VirtualClock) -> FaultStore:
    return FaultStore(clock)


@pytest.fixture
def client(store: FaultStore) -> Iterator[holdfast.Locks]:
    with store.connect() as locks:
        yield locks


@pytest.fixture
def faults(store: FaultStore, clock: VirtualClock) -> Iterator[LockFaults]:
    made = LockFaults(store, clock)
    yield made
    made.close()


def test_a_hold_is_renewed_for_hours(client: holdfast.Locks, clock: VirtualClock) -> None:
    began = time.monotonic()
    with client.lock("a", ttl=30) as lease:
        clock.advance(3 * 3600)
        assert lease.held
        assert lease.remaining > 15
    assert time.monotonic() - began < QUICK_SECONDS


def test_a_hold_without_renewal_ends_at_its_ttl(
    client: holdfast.Locks, clock: VirtualClock
) -> None:
    lease = client.lock("a", ttl=30, renew=False).acquire()
    assert lease is not None
    clock.advance(29)
    assert lease.held
    assert client.lock("a").locked()
    clock.advance(1)
    assert lease.lost
    assert not client.lock("a").locked()


def test_no_thread_renews(client: holdfast.Locks, clock: VirtualClock) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with client.lock("a"):
        after = {thread.name for thread in threading.enumerate()} - before
    assert not after & {"holdfast-renewer", "holdfast-watcher"}


def test_max_hold_ends_a_hold(client: holdfast.Locks, clock: VirtualClock) -> None:
    with pytest.raises(holdfast.LockLost, match="max_hold"), client.lock("a", max_hold=100):
        clock.advance(101)


def test_a_wait_of_the_own_thread_moves_the_clock(
    client: holdfast.Locks, clock: VirtualClock, faults: LockFaults
) -> None:
    with faults.busy("a"):
        began = clock.now()
        with pytest.raises(holdfast.LockTimeout, match="busy"), client.lock("a", timeout=50):
            pass
        assert 50 <= clock.now() - began < 51


def test_a_wait_for_ever_is_told(client: holdfast.Locks, faults: LockFaults) -> None:
    with faults.busy("a"), pytest.raises(RuntimeError, match="waits for ever"):
        client.lock("a").acquire()


def test_a_wait_of_another_thread_ends_when_the_test_moves_the_clock(
    client: holdfast.Locks, clock: VirtualClock, faults: LockFaults
) -> None:
    answers: list[object] = []
    with faults.busy("a"):
        lock = client.lock("a", timeout=60)
        thread = threading.Thread(target=lambda: answers.append(lock.acquire()))
        thread.start()
        while not client.inspect("a").waiters:
            time.sleep(0.01)
        clock.advance(61)
        thread.join(QUICK_SECONDS)
    assert answers == [None]


def test_a_clock_that_stands_still_is_told(
    client: holdfast.Locks, faults: LockFaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual, "STANDS_STILL_SECONDS", 0.1)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.lock("a").acquire(timeout=60)
        except RuntimeError as error:
            errors.append(error)

    with faults.busy("a"):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(QUICK_SECONDS)
    assert "move the clock" in str(errors[0])


def test_a_lost_hold_is_reported_before_lose_returns(
    client: holdfast.Locks, faults: LockFaults
) -> None:
    reasons: list[str] = []
    with pytest.raises(holdfast.LockLost, match="deployed"), client.lock("a") as lease:  # noqa: PT012
        lease.on_lost(reasons.append)
        faults.lose("a", reason="deployed")
        assert lease.lost
        assert len(reasons) == 1


def test_a_callback_may_use_the_client(client: holdfast.Locks, faults: LockFaults) -> None:
    seen: list[bool] = []
    with pytest.raises(holdfast.LockLost), client.lock("a") as lease:  # noqa: PT012
        lease.on_lost(lambda reason: seen.append(client.lock("a").locked()))
        faults.expire("a")
        assert seen == [False]


def test_what_is_not_held_cannot_be_lost(faults: LockFaults) -> None:
    with pytest.raises(ValueError, match="nothing holds 'a'"):
        faults.lose("a")
    with pytest.raises(ValueError, match="nothing holds 'a'"):
        faults.expire("a")


def test_a_hold_survives_a_pause_below_its_ttl(
    client: holdfast.Locks, clock: VirtualClock, faults: LockFaults
) -> None:
    with client.lock("a", ttl=30) as lease:
        faults.pause(20)
        assert lease.held
        clock.advance(60)
        assert lease.held


def test_another_client_has_the_lock_after_a_pause_beyond_the_ttl(
    client: holdfast.Locks, faults: LockFaults
) -> None:
    with pytest.raises(holdfast.LockLost), client.lock("a", ttl=30) as lease:  # noqa: PT012
        faults.pause(31)
        with faults.busy("a"):
            assert lease.lost


def test_a_hold_survives_a_short_outage_and_not_a_long_one(
    client: holdfast.Locks, clock: VirtualClock, faults: LockFaults
) -> None:
    with pytest.raises(holdfast.LockLost, match="outage"), client.lock("a", ttl=30) as lease:  # noqa: PT012
        with faults.outage():
            clock.advance(15)
            assert lease.held
        clock.advance(60)
        assert lease.held
        with faults.outage():
            clock.advance(lease.remaining - 4)
            assert lease.doubtful
            clock.advance(5)
            assert lease.lost


def test_an_acquire_in_an_outage_fails_in_time(
    client: holdfast.Locks, clock: VirtualClock, faults: LockFaults
) -> None:
    with faults.outage(), pytest.raises(holdfast.BackendUnavailable, match="an outage"):
        client.lock("a").acquire(timeout=5)
    assert clock.now() < 7
    with faults.outage(), pytest.raises(holdfast.BackendUnavailable):
        client.list()


def test_a_dropped_lease_is_released_by_the_next_request(client: holdfast.Locks) -> None:
    with pytest.warns(ResourceWarning):
        client.lock("a").acquire()
    assert not client.lock("a").locked()


def test_an_asyncio_block_is_cancelled_when_its_hold_is_lost(
    store: FaultStore, clock: VirtualClock, faults: LockFaults
) -> None:
    async def main() -> None:
        async with store.connect_async() as client:
            with pytest.raises(holdfast.LockLost):  # noqa: PT012
                async with client.lock("a", ttl=30) as lease:
                    clock.advance(600)
                    assert lease.held
                    faults.pause(40)
                    await asyncio.sleep(QUICK_SECONDS)
                    raise AssertionError("not cancelled")

    asyncio.run(main())


def test_a_task_waits_until_the_test_moves_the_clock(
    store: FaultStore, clock: VirtualClock, faults: LockFaults
) -> None:
    async def main() -> None:
        async with store.connect_async() as client:
            with faults.busy("a"):
                waiter = asyncio.create_task(client.lock("a").acquire(timeout=60))
                while not (await client.inspect("a")).waiters:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                clock.advance(61)
                assert await waiter is None

    asyncio.run(main())


def test_without_a_clock_the_time_is_real() -> None:
    store = FaultStore()
    with store.connect(ttl=30) as client, client.lock("a") as lease:
        assert lease.held
        store.down = True
        with pytest.raises(holdfast.BackendUnavailable):
            client.lock("b").acquire(timeout=0)
        store.down = False
    assert store.places["a"].startswith(__file__)
