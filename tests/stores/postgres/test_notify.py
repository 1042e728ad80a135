"""NOTIFY is sent when somebody waits, to that one, and not else: it costs every session of the
database that listens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from servers.postgres import PostgresServer
from stores import sql_helpers
from stores.postgres import bench as postgres_bench
from stores.postgres.bench import Admin, subscriptions
from stores.sql_helpers import LONG, Clients, release_to_waiter, until, wait_for_waiters

if TYPE_CHECKING:
    from holdfast import AsyncLock, AsyncLocks

server, admin = postgres_bench.server, postgres_bench.admin
clients, only_woken = sql_helpers.clients, sql_helpers.only_woken


class Ear:
    """A session of its own that listens to clients' channels."""

    def __init__(self, server: PostgresServer, admin: Admin, namespace: str) -> None:
        self._connection = psycopg.connect(server.url, autocommit=True)
        self._admin, self._mark = admin, f"mark_{namespace}"
        self._heard: list[str] = []
        self._connection.add_notify_handler(lambda message: self._heard.append(message.channel))
        self.listen(self._mark)

    def listen(self, channel: str) -> None:
        self._connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))

    async def heard(self) -> list[str]:
        """The channels of all that was sent since the last look: messages come in the order in
        which they were committed, so nothing is left on its way when one of our own is here."""
        self._admin.execute("SELECT pg_notify(%s, '')", (self._mark,))

        def came() -> bool:
            self._connection.execute("SELECT")
            return self._mark in self._heard

        await until(came, "our own message did not come")
        found, self._heard[:] = self._heard[:-1], []
        return found

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def ear(server: PostgresServer, admin: Admin, namespace: str) -> Iterator[Ear]:
    made = Ear(server, admin, namespace)
    yield made
    made.close()


async def _channel(admin: Admin, namespace: str, holder: AsyncLocks, waiter: AsyncLocks) -> str:
    """Where a client is woken: the entry of one who waits says so."""
    held = await holder.lock("before").acquire()
    assert held is not None
    waiting = asyncio.create_task(waiter.lock("before").acquire())
    await wait_for_waiters(holder, "before")
    ((channel, _),) = subscriptions(admin, namespace)
    assert await held.release() is True
    taken = await waiting
    assert taken is not None
    assert await taken.release() is True
    return channel


async def _alone(client: AsyncLocks, other: AsyncLocks) -> None:
    """Holds of all kinds that nobody waits for; one that asks in vain does not wait."""
    claims = [client.lock("name"), client.rwlock("name").read(), client.rwlock("name").write()]
    for claim in [*claims, client.semaphore("few", 2)]:
        async with claim as lease:
            await lease.extend()
            if lease.name == "name":
                assert await other.lock("name").acquire(timeout=0) is None
    assert (await client.once(f"key {client!r}").run(lambda: 1)).result() == 1


def test_nobody_is_told_of_what_nobody_waits_for(
    server: PostgresServer, admin: Admin, ear: Ear, clients: Clients, namespace: str
) -> None:
    """Not even where somebody has waited before, or has given up."""

    async def body() -> None:
        ours, theirs = clients.open(server.url, ttl=LONG), clients.open(server.url, ttl=LONG)
        for holder, waiter in ((ours, theirs), (theirs, ours)):
            ear.listen(await _channel(admin, namespace, holder, waiter))
        for client, other in ((ours, theirs), (theirs, ours)):
            await _alone(client, other)
            async with client.lock("before"):
                assert await other.lock("before").acquire(timeout=1) is None
                await wait_for_waiters(client, "before", 0)
        assert await ear.heard() == []

    clients.run(body)


@pytest.mark.usefixtures("only_woken")
def test_only_the_waiter_is_told(
    server: PostgresServer, admin: Admin, ear: Ear, clients: Clients, namespace: str
) -> None:
    """Its channel is called as it is let in, for claims of all kinds; nobody else's is."""

    async def body() -> None:
        ours, theirs = clients.open(server.url, ttl=LONG), clients.open(server.url, ttl=LONG)
        channel = await _channel(admin, namespace, ours, theirs)
        ear.listen(channel)
        ear.listen(await _channel(admin, namespace, theirs, ours))
        assert await ear.heard() == []
        pairs: list[tuple[AsyncLock, AsyncLock]] = [
            (ours.lock("name"), theirs.lock("name")),
            (ours.rwlock("name").read(), theirs.rwlock("name").write()),
            (ours.rwlock("name").write(), theirs.rwlock("name").read()),
            (ours.semaphore("few", 1), theirs.semaphore("few", 1)),
        ]
        for held, wanted in pairs:
            lease = await held.acquire()
            assert lease is not None
            taken = await release_to_waiter(lease, wanted, ours)
            assert await taken.release() is True
            assert set(await ear.heard()) == {channel}

    clients.run(body)
