"""Many who come to one row at the same moment: none of them tries in vain again and again."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import holdfast
from backends import mysql_bench
from holdfast.backends.mysql_change import Rows
from holdfast.backends.mysql_row import State
from servers.mysql import MySQLServer

server = mysql_bench.server
DOORS = 50


def test_a_herd_spreads_out(
    server: MySQLServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever steps back reads anew: what it was told before is old by then, and would fail."""
    tries: Counter[str] = Counter()
    write = Rows._write

    async def counted(
        rows: Rows, state: State, owner: str, until: float | None, then: bytes
    ) -> State | None:
        tries[owner] += 1
        return await write(rows, state, owner, until, then)

    monkeypatch.setattr(Rows, "_write", counted)

    async def come() -> None:
        doors = [holdfast.connect_async(server.url, namespace=namespace) for _ in range(DOORS)]
        await asyncio.gather(*(door.check() for door in doors))
        tries.clear()

        async def use(door: holdfast.AsyncLocks) -> None:
            async with door.lock("name", timeout=120):
                pass

        await asyncio.gather(*map(use, doors))
        for door in doors:
            await door.close()

    asyncio.run(come())
    assert max(tries.values()) <= 25  # half as many as there are
