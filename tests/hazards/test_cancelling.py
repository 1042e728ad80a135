"""A cancelled acquire leaves no hold and no queue entry: five hundred real cancellations."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

import holdfast
from holdfast.testing import loops
from servers.proxy import Proxy
from servers.redis import RedisServer
from servers.registry import Servers

TIMES = 500


async def _left(locks: holdfast.AsyncLocks, name: str) -> tuple[int, int]:
    info = await locks.inspect(name)
    return len(info.holders), len(info.waiters)


async def _cleared(locks: holdfast.AsyncLocks, name: str) -> None:
    """Long before the ttl: a cancelled acquire waits for its undo, but not for long."""
    async with asyncio.timeout(30):
        while await _left(locks, name) != (0, 0):
            pass  # each look is a request


async def _cancel_many(url: str, *, contended: bool, seed: int) -> None:
    draw = random.Random(seed)
    async with (
        holdfast.connect_async(url, ttl=60) as ours,
        holdfast.connect_async(url, ttl=60) as theirs,
    ):
        for _ in range(TIMES):
            holder = await theirs.lock("name").acquire() if contended else None
            acquiring = asyncio.ensure_future(ours.lock("name").acquire())
            for _ in range(draw.randrange(12)):  # somewhere between its first and last await
                await asyncio.sleep(0)
            if holder is not None:  # in the very moment of the hand-over
                await holder.release()
            acquiring.cancel()
            lease = None
            with contextlib.suppress(asyncio.CancelledError):
                lease = await acquiring
            if lease is not None:
                assert await lease.release()
            await _cleared(theirs, "name")


@pytest.mark.parametrize("contended", [False, True], ids=["idle", "at the hand-over"])
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_cancelled_acquires_leave_nothing(tmp_path: Path, store: str, contended: bool) -> None:
    """The claim is undone, whichever await was cancelled."""
    url = f"memory://{contended}" if store == "memory" else f"sqlite://{tmp_path}/locks.db"
    loops.run(_cancel_many(url, contended=contended, seed=7))


async def _cancel_unanswered(server: RedisServer, proxy: Proxy) -> None:
    draw = random.Random(11)
    async with (
        holdfast.connect_async(proxy.url, ttl=60) as ours,
        holdfast.connect_async(server.url, ttl=60) as theirs,
    ):
        async with ours.lock("name"):
            pass
        for number in range(TIMES):
            holder = await theirs.lock("name").acquire() if number % 2 else None
            proxy.hold_replies()
            acquiring = asyncio.ensure_future(ours.lock("name").acquire())
            arrived = (1, 1) if holder else (1, 0)
            async with asyncio.timeout(30):
                while draw.random() < 0.95 and await _left(theirs, "name") != arrived:
                    pass  # mostly until it holds or waits; at times its request is on its way
            acquiring.cancel()
            await asyncio.sleep(0)
            if holder is not None:
                assert await holder.release()
            proxy.let_replies()
            with pytest.raises(asyncio.CancelledError):
                await acquiring
            await _cleared(theirs, "name")


def test_cancelled_acquires_without_a_reply_leave_nothing(servers: Servers) -> None:
    """The store has the claim, the client can't know: it is undone in order behind its request."""
    server = servers.of(RedisServer)
    with Proxy(server) as proxy:
        loops.run(_cancel_unanswered(server, proxy))


def test_wait_for_works() -> None:
    """``asyncio.wait_for(lock.acquire(), …)`` times out, or returns the lease."""

    async def main() -> None:
        async with holdfast.connect_async("memory://wait_for") as locks:
            lease = await asyncio.wait_for(locks.lock("name").acquire(), 5)
            assert lease is not None
            assert lease.held

            async def another() -> None:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(locks.lock("name").acquire(), 0.05)

            await asyncio.create_task(another())
            assert await _left(locks, "name") == (1, 0)
            await lease.release()

    loops.run(main())
