"""Dropped objects are released at once, without a run of the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

import holdfast
from holdfast.testing import loops
from holdfast.testing.conformance.bench import SOON, eventually
from servers.process import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_lock_that_is_garbage_drops_its_leases() -> None:
    with holdfast.connect("memory://", ttl=3600) as locks:
        assert locks.lock("name").acquire()
        wait_until("the release", lambda: not locks.inspect("name").holders)


def test_the_leases_of_an_ended_thread_are_dropped() -> None:
    with holdfast.connect("memory://", ttl=3600) as locks:
        lock = locks.lock("name")
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        thread.join()
        del thread
        wait_until("the release", lambda: not locks.inspect("name").holders)
        assert not lock._bare


def test_the_leases_of_an_ended_task_are_dropped() -> None:
    async def main() -> None:
        async with holdfast.connect_async("memory://", ttl=3600) as locks:
            lock = locks.lock("name")
            await asyncio.create_task(_take(lock))

            async def free() -> bool:
                return not (await locks.inspect("name")).holders

            await eventually(free, SOON, "what an ended task took was not released")
            assert not lock._bare

    loops.run(main())


async def _take(lock: holdfast.AsyncLock) -> None:
    assert await lock.acquire()


def test_a_client_forgets_a_hold_that_another_thread_released() -> None:
    """The thread that acquired may be gone by then: nothing of the hold is left behind."""
    with holdfast.connect("memory://", ttl=3600) as locks:
        for number in range(20):
            taken: list[holdfast.Lease | None] = []
            lock = locks.lock(f"order:{number}")

            def take(
                lock: holdfast.Lock = lock, taken: list[holdfast.Lease | None] = taken
            ) -> None:
                taken.append(lock.acquire())

            thread = threading.Thread(target=take)
            thread.start()
            thread.join()
            del thread
            assert taken[0] is not None
            taken[0].release()
        assert not locks._engine.reentry
