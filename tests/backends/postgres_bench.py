"""Waiters on lease rows of PostgreSQL, below the doors: how they stand in line and are rung."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import psycopg

from holdfast.claim import Busy, Claim, Grant
from holdfast.runtimes.clock import now
from holdfast.testing import Flavour, Harness
from holdfast.testing.contract import Bench, Peer

__all__ = ["Admin", "bells", "held", "over", "stand"]

Admin = psycopg.Connection[tuple[object, ...]]


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
    await peer.wait(claim, await peer.queue(claim), now())
    return await peer.queue(claim)


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


def bells(admin: Admin, namespace: str) -> list[tuple[str, str]]:
    """Channel and ring of those who wait."""
    rows = admin.execute(
        "SELECT bell, ring FROM holdfast.waiter WHERE namespace = %s ORDER BY place", (namespace,)
    )
    return [(str(bell), str(ring)) for bell, ring in rows]
