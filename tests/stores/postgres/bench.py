"""What the tests of the PostgreSQL store share: a server, an administrator, and waiters on lease
rows, below the clients: how they stand in line and are woken.

Fixtures are taken over by name: ``server, admin = postgres_bench.server, postgres_bench.admin``.
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

__all__ = ["Admin", "admin", "held", "listens_by", "over", "server", "stand", "subscriptions"]

Admin = psycopg.Connection[tuple[object, ...]]


@pytest.fixture
def server(servers: Servers) -> PostgresServer:
    """The server that most tests use together, each in a namespace of its own."""
    return servers.of(PostgresServer)


@pytest.fixture
def admin(server: PostgresServer) -> Iterator[Admin]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        yield connection


class Running(Harness):
    name = "postgres"

    def __init__(self, url: str) -> None:
        self.url = url


def over(url: str, flavour: Flavour, body: Callable[[Bench], Awaitable[None]]) -> None:
    """Runs a test's body with a bench of its own."""

    async def run() -> None:
        bench = Bench(Running(url), flavour)
        try:
            await body(bench)
        finally:
            await bench.close()

    asyncio.run(run())


async def stand(peer: Peer, claim: Claim) -> Busy:
    """In line, where it can be woken: the first wait only begins to listen."""
    busy = await peer.queue(claim)
    await peer.wait(claim, busy, listens_by(busy))
    return await peer.queue(claim)


def listens_by(busy: Busy) -> float:
    """Until when to wait to begin to listen: that may take its time, but later waits must not."""
    _, heard = busy.ref
    return now() if heard else now() + SOON


async def held(bench: Bench, name: str = "name", *, waited: bool = False) -> tuple[Peer, Grant]:
    """A hold of one who came alone, or has waited and is likely to leave others behind."""
    first, second = bench.peer(), bench.peer()
    grant = await first.take(bench.claim(name))
    if not waited:
        return first, grant
    claim = bench.claim(name)
    await stand(second, claim)
    assert await first.release(grant)
    return second, await second.take(claim)


def subscriptions(admin: Admin, namespace: str) -> list[tuple[str, str]]:
    """Channel and ring of those who wait."""
    rows = admin.execute(
        "SELECT bell, ring FROM holdfast.waiter WHERE namespace = %s ORDER BY place", (namespace,)
    )
    return [(str(subscription), str(wake)) for subscription, wake in rows]
