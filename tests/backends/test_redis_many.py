"""Many waiters and many holds of one door, counted at the server: few requests, one batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

import holdfast
from backends.redis_bench import connections, scripts_run, somebody_rests
from servers.process import wait_until
from servers.redis import RedisServer

MANY = 1000


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server that nobody else asks anything."""
    with RedisServer() as server:
        yield server


def test_a_thousand_tasks_take_few_requests_and_connections(server: RedisServer) -> None:
    """They are served in order, with at most 2.2 requests a hold over at most 6 connections."""
    served: list[int] = []
    most: list[int] = []

    async def main() -> None:
        async with holdfast.connect_async(server.url) as locks:
            lock = locks.lock("name")

            async def use(number: int) -> None:
                async with lock:
                    served.append(number)

            async with lock:
                users = [asyncio.create_task(use(number)) for number in range(MANY)]
                await asyncio.to_thread(wait_until, "the waiters", lambda: somebody_rests(server))
            await asyncio.wait(users, return_when=asyncio.FIRST_COMPLETED)
            most.append(await asyncio.to_thread(connections, server))
            await asyncio.gather(*users)

    asyncio.run(main())
    assert served == list(range(MANY))
    assert scripts_run(server) <= 2.2 * MANY
    assert most[0] <= 6


def test_a_thousand_holds_are_renewed_in_one_batch(server: RedisServer) -> None:
    """By one thread, over one connection: one script call each, all in a few writes."""
    before = set(threading.enumerate())
    with holdfast.connect(server.url, ttl=30) as locks:
        leases = [locks.lock(f"name:{number}").acquire() for number in range(MANY)]
        threads = {thread.name for thread in set(threading.enumerate()) - before}
        assert {name for name in threads if name.startswith("holdfast")} == {"holdfast-keeper"}
        asked = scripts_run(server)
        keep = locks._keeper.keep
        batches: list[int] = []
        renew = keep.backend.renew

        async def counted(grants: list[object], *args: object, **words: object) -> object:
            batches.append(len(grants))
            return await renew(grants, *args, **words)  # type: ignore[arg-type]

        keep.backend.renew = counted  # type: ignore[method-assign, assignment]
        for hold in keep.holds.values():
            hold.renew_at = 0.0  # as if a third of the ttl had passed
        keep.plan(0.0)
        wait_until("the renewals", lambda: scripts_run(server) >= asked + MANY)
        assert batches == [MANY]
        assert all(lease is not None and lease.release() for lease in leases)
