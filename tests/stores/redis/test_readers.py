"""Many readers of one name: what one of them costs a server does not grow with their number."""

from __future__ import annotations

import random

import pytest

from holdfast.claim import Claim, Mode
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from servers.redis import RedisServer
from stores.redis.helpers import over
from stores.redis.test_gaps import reads, server

__all__ = ["server"]


def _many(bench: Bench, mode: Mode, count: int) -> list[Claim]:
    limit = 1000 if mode is Mode.SLOTS else 0
    return [bench.claim(mode=mode, limit=limit) for _ in range(count)]


@pytest.mark.parametrize("mode", [Mode.SHARED, Mode.SLOTS])
def test_waking_many_costs_the_same_for_each(server: RedisServer, mode: Mode) -> None:
    """They attempt in any order after they were woken; each reads a bounded number of fields."""
    costs: list[int] = []

    async def body(bench: Bench) -> None:
        for count in (10, 100):
            peer = bench.peer()
            everything = bench.claim(mode=Mode.EXCLUSIVE)
            if mode is Mode.SLOTS:
                everything = bench.claim(mode=mode, limit=1000, weight=1000)
            held, waiting = await peer.take(everything), _many(bench, mode, count)
            for claim in waiting:
                await peer.queue(claim)
            await peer.release(held)
            random.Random(count).shuffle(waiting)
            before = reads(server)
            grants = [await peer.take(claim) for claim in waiting]
            costs.append((reads(server) - before) // count)
            for grant in grants:
                await peer.release(grant)

    over(server.url, Flavour.BLOCKING, body)
    assert costs[1] <= costs[0] + 1
