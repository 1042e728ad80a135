"""NOTIFY is sent only if there is a waiter, and only to it: a notification costs every session of
the database that listens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from servers.postgres import PostgresServer
from stores import sql_helpers
from stores.postgres import helpers
from stores.postgres.helpers import Admin, wakeups_of
from stores.sql_helpers import LONG, Clients, release_to_waiter, until, wait_for_waiters

if TYPE_CHECKING:
    from holdfast import AsyncLock, AsyncLocks

server, admin = helpers.server, helpers.admin
clients, only_woken = sql_helpers.clients, sql_helpers.only_woken


class Listener:
    """A session of its own that listens to the clients' channels."""

    def __init__(self, server: PostgresServer, admin: Admin, namespace: str) -> None:
        self._connection = psycopg.connect(server.url, autocommit=True)
        self._admin, self._mark = admin, f"mark_{namespace}"
        self._received: list[str] = []
        self._connection.add_notify_handler(lambda message: self._received.append(message.channel))
        self.listen(self._mark)

    def listen(self, channel: str) -> None:
        self._connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))

    async def received(self) -> list[str]:
        """Returns the channels of all notifications since the last call. They arrive in the order
        of their commits, so none is left on its way when our own arrives."""
        self._admin.execute("SELECT pg_notify(%s, '')", (self._mark,))

        def arrived() -> bool:
            self._connection.execute("SELECT")
            return self._mark in self._received

        await until(arrived, "our own notification did not arrive")
        found, self._received[:] = self._received[:-1], []
        return found

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def listener(server: PostgresServer, admin: Admin, namespace: str) -> Iterator[Listener]:
    made = Listener(server, admin, namespace)
    yield made
    made.close()


async def _channel(admin: Admin, namespace: str, holder: AsyncLocks, waiter: AsyncLocks) -> str:
    """Returns the channel of a client, from the queue entry of its claim."""
    held = await holder.lock("before").acquire()
    assert held is not None
    waiting = asyncio.create_task(waiter.lock("before").acquire())
    await wait_for_waiters(holder, "before")
    ((channel, _),) = wakeups_of(admin, namespace)
    assert await held.release() is True
    taken = await waiting
    assert taken is not None
    assert await taken.release() is True
    return channel


async def _alone(client: AsyncLocks, other: AsyncLocks) -> None:
    """Takes holds of all kinds without waiters; an attempt with timeout 0 does not wait."""
    claims = [client.lock("name"), client.rwlock("name").read(), client.rwlock("name").write()]
    for claim in [*claims, client.semaphore("few", 2)]:
        async with claim as lease:
            await lease.extend()
            if lease.name == "name":
                assert await other.lock("name").acquire(timeout=0) is None
    assert (await client.once(f"key {client!r}").run(lambda: 1)).result() == 1


def test_no_notification_without_a_waiter(
    server: PostgresServer, admin: Admin, listener: Listener, clients: Clients, namespace: str
) -> None:
    """Not even after an earlier wait, or one that timed out."""

    async def body() -> None:
        ours, theirs = clients.open(server.url, ttl=LONG), clients.open(server.url, ttl=LONG)
        for holder, waiter in ((ours, theirs), (theirs, ours)):
            listener.listen(await _channel(admin, namespace, holder, waiter))
        for client, other in ((ours, theirs), (theirs, ours)):
            await _alone(client, other)
            async with client.lock("before"):
                assert await other.lock("before").acquire(timeout=1) is None
                await wait_for_waiters(client, "before", 0)
        assert await listener.received() == []

    clients.run(body)


@pytest.mark.usefixtures("only_woken")
def test_only_the_waiter_is_notified(
    server: PostgresServer, admin: Admin, listener: Listener, clients: Clients, namespace: str
) -> None:
    """Its channel is notified when it is admitted, for claims of all kinds; no other channel is."""

    async def body() -> None:
        ours, theirs = clients.open(server.url, ttl=LONG), clients.open(server.url, ttl=LONG)
        channel = await _channel(admin, namespace, ours, theirs)
        listener.listen(channel)
        listener.listen(await _channel(admin, namespace, theirs, ours))
        assert await listener.received() == []
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
            assert set(await listener.received()) == {channel}

    clients.run(body)
