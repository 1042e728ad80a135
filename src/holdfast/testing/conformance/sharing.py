"""Readers and writers through the clients."""

from __future__ import annotations

import asyncio

from holdfast.claim import Mode
from holdfast.core.contract import Guarantee
from holdfast.errors import Unsupported
from holdfast.testing.conformance.bench import SOON, Bench, conformance, raises, within

__all__: list[str] = []

SHARED = Guarantee.SHARED


@conformance.rule()
async def what_a_store_can_t_do_is_refused(bench: Bench) -> None:
    """A primitive that the store has no promise for raises ``Unsupported`` when it is made."""
    client = bench.client()
    for guarantee, make in (
        (SHARED, lambda: client.rwlock("name")),
        (Guarantee.SLOTS, lambda: client.semaphore("name", 2)),
    ):
        if guarantee in bench.guarantees:
            make()
        else:
            with raises(Unsupported):
                make()


@conformance.rule(SHARED)
async def readers_share_and_writers_do_not(bench: Bench) -> None:
    """Readers of several clients hold together; a writer waits for all of them."""
    ours, theirs = bench.client(), bench.client()
    async with ours.rwlock("name").read() as one, theirs.rwlock("name").read() as other:
        assert (one.mode, other.mode) == (Mode.SHARED, Mode.SHARED)
        assert await theirs.rwlock("name").write().acquire(blocking=False) is None
        assert not await theirs.rwlock("name").read().locked()
        assert await theirs.rwlock("name").write().locked()
    async with ours.rwlock("name").write() as writer:
        assert writer.mode is Mode.EXCLUSIVE
        assert writer.token > max(one.token, other.token)
        assert await theirs.rwlock("name").read().acquire(blocking=False) is None
        assert await theirs.rwlock("name").write().acquire(blocking=False) is None


@conformance.rule(SHARED)
async def a_writer_is_a_lock(bench: Bench) -> None:
    """``write()`` and ``lock()`` of one name are the same claim."""
    ours, theirs = bench.client(), bench.client()
    async with ours.lock("name"):
        assert await theirs.rwlock("name").write().acquire(blocking=False) is None
        assert await theirs.rwlock("name").read().acquire(blocking=False) is None
    async with ours.rwlock("name").read():
        assert await theirs.lock("name").acquire(blocking=False) is None


@conformance.rule(SHARED)
async def a_waiting_writer_is_not_starved(bench: Bench) -> None:
    """Readers that come all the time do not keep a writer out."""
    writer, readers = bench.client(), [bench.client() for _ in range(2)]
    ended = asyncio.Event()

    async def read(number: int) -> None:
        while not ended.is_set():
            async with readers[number % 2].rwlock("name", timeout=SOON).read():
                await asyncio.sleep(0.005)

    reading = [asyncio.create_task(read(number)) for number in range(6)]
    try:
        for _ in range(3):
            lease = await writer.rwlock("name").write().acquire(timeout=SOON)
            assert lease is not None, "the writer was starved"
            await lease.release()
    finally:
        ended.set()
        await within(SOON, asyncio.gather(*reading))


@conformance.rule(SHARED)
async def waiting_readers_come_in_together(bench: Bench) -> None:
    """All who wait to read are let in by one release, also those of one client."""
    ours, theirs = bench.client(), bench.client()
    inside = asyncio.Barrier(4)

    async def read() -> None:
        async with theirs.rwlock("name", timeout=SOON).read():
            await inside.wait()  # nobody leaves before all are in

    async with ours.rwlock("name").write():
        reading = [asyncio.create_task(read()) for _ in range(4)]
        await asyncio.wait(reading, timeout=0.1)
    await within(SOON, asyncio.gather(*reading))
