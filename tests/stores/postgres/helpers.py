"""What the tests of the PostgreSQL store share: a server, an administrator's connection, and
waiters on lease rows at the level of the backend.

Import fixtures by name: ``server, admin = helpers.server, helpers.admin``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import psycopg
import pytest

from holdfast.claim import Busy, Claim, Grant
from holdfast.io.clock import now
from holdfast.testing import Flavour, Harness
from holdfast.testing.contract import Bench, Peer
from holdfast.testing.contract.bench import SOON
from servers.postgres import PostgresServer
from servers.registry import Servers

__all__ = [
    "Admin",
    "admin",
    "enqueue",
    "held",
    "run_with_bench",
    "server",
    "subscribe_by",
    "wakeups_of",
]

Admin = psycopg.Connection[tuple[object, ...]]


@pytest.fixture
def server(servers: Servers) -> PostgresServer:
    """The server that most tests share, each in a namespace of its own."""
    return servers.of(PostgresServer)


@pytest.fixture
def admin(server: PostgresServer) -> Iterator[Admin]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        yield connection


class Running(Harness):
    name = "postgres"

    def __init__(self, url: str) -> None:
        self.url = url


def run_with_bench(url: str, flavour: Flavour, body: Callable[[Bench], Awaitable[None]]) -> None:
    """Runs a test's body with a bench of its own."""

    async def run() -> None:
        bench = Bench(Running(url), flavour)
        try:
            await body(bench)
        finally:
            await bench.close()

    asyncio.run(run())


async def enqueue(peer: Peer, claim: Claim) -> Busy:
    """Queues a claim and subscribes, so that it can be woken: the first wait only subscribes."""
    busy = await peer.queue(claim)
    await peer.wait(claim, busy, subscribe_by(busy))
    return await peer.queue(claim)


def subscribe_by(busy: Busy) -> float:
    """Deadline of a wait that only subscribes: the first may take long, later ones must not."""
    _, generation = busy.ref
    return now() if generation else now() + SOON


async def held(bench: Bench, name: str = "name", *, waited: bool = False) -> tuple[Peer, Grant]:
    """Returns a peer with its grant, taken at once or after a wait. A holder that has waited
    releases differently: there may be more waiters."""
    first, second = bench.peer(), bench.peer()
    grant = await first.take(bench.claim(name))
    if not waited:
        return first, grant
    claim = bench.claim(name)
    await enqueue(second, claim)
    assert await first.release(grant)
    return second, await second.take(claim)


def wakeups_of(admin: Admin, namespace: str) -> list[tuple[str, str]]:
    """Returns the channel and the wake-up text of each waiter, in the order of the queue."""
    rows = admin.execute(
        "SELECT bell, ring FROM holdfast.waiter WHERE namespace = %s ORDER BY place", (namespace,)
    )
    return [(str(channel), str(wakeup)) for channel, wakeup in rows]
