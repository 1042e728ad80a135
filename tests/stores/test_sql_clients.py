"""Both clients of both SQL stores: the connections of a crowd, and a network that goes dark."""

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

WAITERS, NAMES, CONNECTIONS = 200, 20, 6


async def _count(store: Store, waiting: asyncio.Future[list[int]]) -> int:
    """The most sessions that the crowd had at a time, until all are served."""
    most = len(store.sessions("crowd"))
    while not waiting.done():
        most = max(most, len(await asyncio.to_thread(store.sessions, "crowd")))
        await asyncio.sleep(0.01)
    return most


async def _hold(client: AsyncLocks, number: int) -> int:
    async with client.lock(f"name {number % NAMES}") as lease:
        return lease.token


def test_many_waiters_share_a_few_connections(store: Store, clients: Clients) -> None:
    """200 wait for 20 names over at most six connections, as they wait and as they are let in one
    after the other, and all are served."""

    async def body() -> None:
        crowd, looking = clients.open(store.url(mark="crowd")), clients.open(store.url())
        leases = [await crowd.lock(f"name {number}").acquire() for number in range(NAMES)]
        waiting = asyncio.gather(*(_hold(crowd, number) for number in range(WAITERS)))
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
        assert 0 < await counting <= CONNECTIONS

    clients.run(body)


@pytest.mark.parametrize("mode", MODES)
def test_a_dark_network_ends_the_hold_in_time(store: Store, clients: Clients, mode: str) -> None:
    """A connection that is black-holed: the holder is told by its clock, the next one gets it."""

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
                await until(lambda: reasons, "nobody was told")
                assert later.held
            finally:
                proxy.resume()
            assert await lease.release() is False
            assert await later.release() is True
            async with ours.lock("name") as again:  # over connections that work
                assert again.token > later.token

    clients.run(body)
