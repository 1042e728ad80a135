"""Sessions that the server or the network ends: losses are reported, everything else continues."""

from __future__ import annotations

import asyncio
import time

import pytest

from holdfast.testing import Flavour
from servers.proxy import Proxy
from stores import sql_helpers
from stores.sql_helpers import LONG, MODES, Clients, Store, until, wait_for_waiters

pytestmark = pytest.mark.faults

store, clients, only_woken = sql_helpers.store, sql_helpers.clients, sql_helpers.only_woken


@pytest.mark.parametrize("fault", ["killed", "dropped"])
def test_the_renewer_sees_that_a_session_has_ended(
    store: Store, clients: Clients, fault: str
) -> None:
    """In advisory mode the hold ends with its connection. The callback runs although no request is
    sent and the next renewal is minutes away; only holds of this client are affected."""

    async def body() -> None:
        with Proxy(store.server) as proxy:
            ours = clients.open(store.url("advisory", "ours", proxy), ttl=LONG)
            theirs = clients.open(store.url("advisory", "theirs"), ttl=LONG)
            reasons: list[str] = []
            leases = [await ours.lock("name").acquire(), await ours.semaphore("few", 2).acquire()]
            kept = await theirs.lock("kept").acquire()
            assert kept is not None
            for lease in leases:
                assert lease is not None
                lease.on_lost(reasons.append)
            if fault == "killed":
                await store.kill_all("ours")
            else:
                proxy.cut()
            await until(lambda: len(reasons) == 2, "on_lost was not called")
            for lease in leases:
                assert lease is not None
                assert lease.lost
                assert await lease.release() is False
            async with theirs.lock("name") as later, theirs.semaphore("few", 2, permits=2):
                assert leases[0] is not None
                assert later.token > leases[0].token
            assert kept.held
            assert await kept.release() is True

    clients.run(body)


def test_killed_sessions_lose_no_lease(store: Store, clients: Clients) -> None:
    """Rows do not end with connections: the holder opens new ones."""

    async def body() -> None:
        ours = clients.open(store.url(mark="ours"), ttl=LONG)
        lease = await ours.lock("name").acquire()
        assert lease is not None
        await store.kill_all("ours")
        await lease.extend()
        assert lease.held
        assert store.sessions("ours")
        assert await lease.release() is True

    clients.run(body)


@pytest.mark.usefixtures("only_woken")
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_waiter_joins_the_queue_again(store: Store, clients: Clients, mode: str) -> None:
    """All sessions of a waiter are killed, twice. It is not granted by that, and the release still
    wakes it."""

    async def body() -> None:
        holder = clients.open(store.url(mode), ttl=LONG)
        waiter = clients.open(store.url(mode, "waiter"), ttl=LONG)
        lease = await holder.lock("name").acquire()
        assert lease is not None
        waiting = asyncio.create_task(waiter.lock("name").acquire())
        for _ in range(2):
            await wait_for_waiters(holder)
            await store.kill_all("waiter")
            await until(lambda: store.sessions("waiter"), "the waiter opened no new session")
        await wait_for_waiters(holder)
        assert not waiting.done()
        assert lease.held
        assert await lease.release() is True
        taken = await waiting
        assert taken is not None
        assert taken.token > lease.token
        assert await taken.release() is True

    clients.run(body)


@pytest.mark.parametrize("mode", MODES)
def test_a_release_whose_reply_is_lost_is_unknown(
    store: Store, clients: Clients, mode: str
) -> None:
    """The request ran, or did not: the hold is over in the end, and nobody else had it."""

    async def body() -> None:
        with Proxy(store.server) as proxy:
            ours, theirs = clients.open(store.url(mode, proxy=proxy)), clients.open(store.url(mode))
            for lock in (ours.lock("name"), ours.semaphore("few", 2)):
                async with lock:  # the next one uses a connection that is open
                    pass
                lease = await lock.acquire()
                assert lease is not None
                proxy.drop_next_reply()
                assert await lease.release() is None
                async with theirs.lock("name") as later:
                    assert later.held

    clients.run(body)


@pytest.mark.parametrize("clients", [Flavour.ASYNCIO], indirect=True)
def test_sessions_that_end_while_the_loop_stands_still(store: Store, clients: Clients) -> None:
    """The next request opens a connection, and does not fail."""

    async def body() -> None:
        ours = clients.open(store.url(mark="ours"), ttl=LONG)
        lease = await ours.lock("name").acquire()
        assert lease is not None
        for session in store.sessions("ours"):
            store.kill(session)
        while store.sessions("ours"):
            time.sleep(0.01)  # the loop stands still
        await lease.extend()
        assert await lease.release() is True

    clients.run(body)
