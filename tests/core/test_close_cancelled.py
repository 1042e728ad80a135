"""``close()`` of an asyncio client that is cancelled: nothing is held or renewed after it."""

from __future__ import annotations

import asyncio
import threading
from uuid import uuid4

import pytest

import holdfast


async def _cancelled_close(locks: holdfast.AsyncLocks, turns: int) -> None:
    closing = asyncio.create_task(locks.close())
    for _ in range(turns):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait((closing,))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("turns", [1, 2, 3, 5])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_is_held_is_released(turns: int, background: bool) -> None:
    async def main() -> None:
        url = f"memory://{uuid4().hex}"
        locks = holdfast.connect_async(url, ttl=3600)
        lease = await locks.lock("name").acquire()
        assert lease
        if background:  # as an undo that the store has not answered
            await locks._runtime.finish(asyncio.sleep(0.3), 0)
        await _cancelled_close(locks, turns)
        await locks.close()
        async with holdfast.connect_async(url) as other:
            again = await other.lock("name").acquire(timeout=20)
            assert again
            await again.release()
        assert not lease.held
        thread = locks._renewer_thread._one.thread
        assert thread
        await asyncio.to_thread(threading.Thread.join, thread, 20)
        assert not thread.is_alive()

    asyncio.run(main())
