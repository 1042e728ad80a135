"""Lease rows through PgBouncer in transaction mode: everything works there. Waiters are woken if a
``listen_url`` bypasses the pooler; else they poll."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psycopg
import pytest

import holdfast
from servers.postgres import PgBouncer, PostgresServer
from stores import sql_helpers
from stores.postgres import helpers
from stores.sql_helpers import LONG, Clients, release_to_waiter, wait_for_waiters

if TYPE_CHECKING:
    from holdfast import AsyncLocks

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("only_woken")]

server = helpers.server
clients, only_woken = sql_helpers.clients, sql_helpers.only_woken


@pytest.fixture(params=["listens", "polls"])
def listens(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "listens")


@pytest.fixture
def url(server: PostgresServer, listens: bool) -> Iterator[str]:
    """Through a pooler that has fewer sessions than a client has connections."""
    with PgBouncer(server, pool=2) as pooler:
        yield pooler.url + (f"?listen_url={server.url}" if listens else "")


def test_tokens_grow(url: str, clients: Clients) -> None:
    """Two clients and their tasks hold one after the other: each token is higher than the last."""
    tokens: list[int] = []

    async def work(client: AsyncLocks) -> None:
        for _ in range(3):
            async with client.lock("name") as lease:
                tokens.append(lease.token)

    async def body() -> None:
        both = clients.open(url), clients.open(url)
        async with both[0].lock("name") as lease:
            tokens.append(lease.token)
            working = [asyncio.create_task(work(client)) for client in both * 3]
            await wait_for_waiters(both[0], count=2)
        await asyncio.gather(*working)
        assert len(tokens) == 19
        assert tokens == sorted(set(tokens))

    clients.run(body)


def test_waiters_are_woken(url: str, clients: Clients, listens: bool) -> None:
    """Two clients hold in turn. From the second time on both are subscribed, and only the wake-up
    ends a wait, unless they poll. ``check`` says which."""

    async def body() -> None:
        ours, theirs = clients.open(url, ttl=LONG), clients.open(url, ttl=LONG)
        lease = await ours.lock("name").acquire()
        assert lease is not None
        for client in (theirs, ours, theirs, ours):
            lease = await release_to_waiter(lease, client.lock("name"), theirs)
            found = {finding.subject: finding.level for finding in await client.check()}
            assert found["server"] == "ok"
            assert found["waiting"] == ("ok" if listens else "warning")
        assert await lease.release() is True

    clients.run(body)


def test_readers_share_and_exclude_a_writer(url: str, clients: Clients) -> None:
    """A writer waits for the last reader, and a reader for the writer."""

    async def body() -> None:
        ours, theirs = clients.open(url, ttl=LONG), clients.open(url, ttl=LONG)
        first = await ours.rwlock("name").read().acquire()
        last = await theirs.rwlock("name").read().acquire(timeout=0)
        assert first is not None
        assert last is not None
        assert await ours.rwlock("name").write().acquire(timeout=0) is None
        assert await first.release() is True
        writer = await release_to_waiter(last, ours.rwlock("name").write(), theirs)
        assert await theirs.rwlock("name").read().acquire(timeout=0) is None
        reader = await release_to_waiter(writer, theirs.rwlock("name").read(), theirs)
        assert await reader.release() is True

    clients.run(body)


def test_slots_are_counted(url: str, clients: Clients) -> None:
    """Two of two slots are taken: the third claim waits, and gets the slot that is released."""

    async def body() -> None:
        ours, theirs = clients.open(url, ttl=LONG), clients.open(url, ttl=LONG)
        one = await ours.semaphore("name", 2).acquire()
        other = await theirs.semaphore("name", 2).acquire(timeout=0)
        assert one is not None
        assert other is not None
        assert {*one.slots, *other.slots} == {0, 1}
        third = await release_to_waiter(one, theirs.semaphore("name", 2), ours)
        assert third.slots == one.slots
        for lease in (other, third):
            assert await lease.release() is True

    clients.run(body)


def test_a_job_runs_once(url: str, clients: Clients) -> None:
    """Two clients run a job at the same time: one executes it, and both get its outcome."""
    ran: list[int] = []

    def job() -> str:
        ran.append(1)
        return "done"

    async def body() -> None:
        both = clients.open(url), clients.open(url)
        jobs = [asyncio.create_task(client.once("key").run(job)) for client in both * 2]
        assert {outcome.result() for outcome in await asyncio.gather(*jobs)} == {"done"}
        assert len(ran) == 1

    clients.run(body)


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_the_isolation_of_the_role_does_not_matter(namespace: str, isolation: str) -> None:
    """Clients that compete get a lease or None, and are told of their releases."""
    with PostgresServer() as own:
        with psycopg.connect(own.url, autocommit=True) as admin:
            level = f"ALTER ROLE holdfast SET default_transaction_isolation = '{isolation}'"
            admin.execute(level.encode())
        with PgBouncer(own, pool=4) as pooler:

            def compete(_: int) -> int:
                told = 0
                with holdfast.connect(pooler.url, namespace=namespace) as locks:
                    lock = locks.lock("it's $1", note="a 'note' \\ for $2")
                    for _ in range(6):
                        lease = lock.acquire(timeout=0) or lock.acquire()
                        told += lease is not None and lease.release() is True
                return told

            with ThreadPoolExecutor(4) as threads:
                assert list(threads.map(compete, range(4))) == [6] * 4
