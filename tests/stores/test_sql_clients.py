"""Both kinds of client of both SQL stores: connections of many waiters, and a silent network."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from servers.proxy import Proxy
from stores import sql_helpers
from stores.sql_helpers import MODES, Clients, Store, until, wait_for_waiters

if TYPE_CHECKING:
    from holdfast import AsyncLocks

pytestmark = pytest.mark.faults

store, clients = sql_helpers.store, sql_helpers.clients

WAITERS, NAMES = 200, 20
CONNECTIONS = {"Postgres": 6, "MySQL": 7}
"""Four for requests, one for the renewer; for wake-ups one on PostgreSQL and two on MySQL."""


async def _count(store: Store, waiting: asyncio.Future[list[int]]) -> int:
    """Return the largest number of sessions at a time, until all claims were granted."""
    most = len(store.sessions("waiters"))
    while not waiting.done():
        most = max(most, len(await asyncio.to_thread(store.sessions, "waiters")))
        await asyncio.sleep(0.01)
    return most


async def _hold(client: AsyncLocks, number: int) -> int:
    async with client.lock(f"name {number % NAMES}") as lease:
        return lease.token


def test_many_waiters_share_a_few_connections(store: Store, clients: Clients) -> None:
    """200 claims wait for 20 names on a few connections, while they wait and while they are
    granted one after the other; all are granted."""

    async def body() -> None:
        client, looking = clients.open(store.url(mark="waiters")), clients.open(store.url())
        leases = [await client.lock(f"name {number}").acquire() for number in range(NAMES)]
        waiting = asyncio.gather(*(_hold(client, number) for number in range(WAITERS)))
        for number in range(NAMES):
            await wait_for_waiters(looking, f"name {number}")
        counting = asyncio.create_task(_count(store, waiting))
        for lease in leases:
            assert lease is not None
            assert await lease.release() is True
        tokens = await waiting
        assert len(tokens) == WAITERS
        for number in range(NAMES):
            first = leases[number]
            own = [first.token if first else 0, *tokens[number::NAMES]]
            assert len(set(own)) == len(own)
            assert min(own) == own[0]
        assert 0 < await counting <= CONNECTIONS[type(store).__name__]

    clients.run(body)


@pytest.mark.parametrize("mode", MODES)
def test_a_silent_network_ends_the_hold_in_time(store: Store, clients: Clients, mode: str) -> None:
    """Packets are lost without an error: the holder is warned by its own clock, and the next claim
    is granted after that."""

    async def body() -> None:
        with Proxy(store.server) as proxy:
            ours = clients.open(store.url(mode, proxy=proxy))
            theirs = clients.open(store.url(mode))
            reasons: list[str] = []
            lease = await ours.lock("name", ttl=1.0).acquire()
            assert lease is not None
            lease.on_lost(reasons.append)
            proxy.stall()
            try:
                later = await theirs.lock("name").acquire()
                assert not lease.held
                assert later is not None
                assert later.token > lease.token
                await until(lambda: reasons, "on_lost was not called")
                assert later.held
            finally:
                proxy.resume()
            assert await lease.release() is False
            assert await later.release() is True
            async with ours.lock("name") as again:  # on new connections
                assert again.token > later.token

    clients.run(body)
