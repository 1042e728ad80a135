"""Many waiters and many holds of one client, counted at the server: few requests, one batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast.testing import Flavour
from servers.process import wait_until
from servers.proxy import Proxy
from servers.redis import RedisServer
from stores.redis.helpers import (
    blocking_and_asyncio,
    clients,
    connections,
    scripts_run,
    until,
    waiter_sleeps,
)

MANY = 1000


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server that only this test uses."""
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
                await asyncio.to_thread(wait_until, "the waiters", lambda: waiter_sleeps(server))
            await asyncio.wait(users, return_when=asyncio.FIRST_COMPLETED)
            most.append(await asyncio.to_thread(connections, server))
            await asyncio.gather(*users)

    asyncio.run(main())
    assert served == list(range(MANY))
    assert scripts_run(server) <= 2.2 * MANY
    assert most[0] <= 6


def _renew_all(client: Any) -> None:
    """Makes the renewer renew all holds now, as if a third of the ttl had passed."""
    renewer = client._renewer_thread.renewer
    for hold in renewer.holds.values():
        hold.renew_at = 0.0
    renewer.plan(0.0)


def _renewed(client: Any) -> bool:
    """True if all holds are renewed."""
    return all(hold.renew_at > 0.0 for hold in client._renewer_thread.renewer.holds.values())


@blocking_and_asyncio
def test_a_thousand_holds_are_renewed_in_one_batch(server: RedisServer, flavour: Flavour) -> None:
    """By one thread, over one connection: one script call each, and many before the first reply, so
    that all of them take four round trips."""
    before = set(threading.enumerate())

    async def main(proxy: Proxy) -> None:
        async with clients(proxy.url, flavour, ttl=600) as (client,):
            leases = [await client.lock(f"name:{number}").acquire() for number in range(MANY)]
            threads = {thread.name for thread in set(threading.enumerate()) - before}
            ours = {name for name in threads if name.startswith("holdfast")}
            assert ours - {"holdfast-watcher"} == {"holdfast-renewer"}
            _renew_all(client)  # connects, and loads the script into the server
            await until(lambda: _renewed(client))
            asked = scripts_run(server)
            proxy.reset_counts()
            proxy.hold_replies()
            try:
                _renew_all(client)
                await until(lambda: scripts_run(server) >= asked + MANY / 4)
                assert not _renewed(client)
            finally:
                proxy.let_replies()
            await until(lambda: _renewed(client))
            assert (scripts_run(server) - asked, proxy.counts.connections) == (MANY, 0)
            assert all([await lease.release() for lease in leases])

    with Proxy(server) as proxy:
        asyncio.run(main(proxy))
