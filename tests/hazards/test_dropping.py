"""What nobody has any more is let go at once, without waiting for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

import holdfast
from holdfast.testing.conformance.bench import SOON, eventually
from servers.process import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_lock_that_nobody_has_lets_go_of_what_it_gave() -> None:
    with holdfast.connect("memory://", ttl=3600) as locks:
        assert locks.lock("name").acquire()
        wait_until("the release", lambda: not locks.inspect("name").holders)


def test_a_thread_that_ended_lets_go_of_what_it_took() -> None:
    with holdfast.connect("memory://", ttl=3600) as locks:
        lock = locks.lock("name")
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        thread.join()
        del thread
        wait_until("the release", lambda: not locks.inspect("name").holders)
        assert not lock._bare


def test_a_task_that_ended_lets_go_of_what_it_took() -> None:
    async def main() -> None:
        async with holdfast.connect_async("memory://", ttl=3600) as locks:
            lock = locks.lock("name")
            await asyncio.create_task(_take(lock))

            async def free() -> bool:
                return not (await locks.inspect("name")).holders

            await eventually(free, SOON, "what an ended task took was not released")
            assert not lock._bare

    asyncio.run(main())


async def _take(lock: holdfast.AsyncLock) -> None:
    assert await lock.acquire()


def test_a_client_forgets_what_was_released_by_another_than_who_took_it() -> None:
    """Who took it may be gone by then: nothing of that hold is left behind."""
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
