"""How many requests one hold takes: counted by a relay between each contender and its server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from benchmarks.tape import Relay
from holdfast.bench.bounds import Alarm, limited
from holdfast.bench.contender import Book, Contender, Target
from holdfast.bench.jobs import find, read_target

__all__ = ["requests_job"]

HOLDS = 10
LIMIT_SECONDS = 10.0


def requests_job(book: Book, contenders: list[str], target: list[Any]) -> Any:
    """Requests per hold, by contender; one that fails is left out, as its row tells why."""
    counts: dict[str, float] = {}
    aim = read_target(target)
    for contender in find(book, contenders):
        relay = Relay(aim.url)
        with suppress(Exception, Alarm), limited(LIMIT_SECONDS):
            counts[contender.name] = _count(contender, aim._replace(url=relay.url), relay)
        relay.close()
    return counts


def _count(contender: Contender, target: Target, relay: Relay) -> float:
    if contender.flavour == "asyncio":
        return asyncio.run(_count_async(contender, target, relay))
    client: Any = contender.open(target)
    pair = client.lock("counted")
    before = 0
    for hold in range(3 + HOLDS):
        if hold == 3:
            before = relay.turns()
        pair.acquire()
        pair.release()
    return (relay.turns() - before) / HOLDS


async def _count_async(contender: Contender, target: Target, relay: Relay) -> float:
    client: Any = await contender.open(target)  # type: ignore[misc]
    pair = client.lock("counted")
    before = 0
    for hold in range(3 + HOLDS):
        if hold == 3:
            before = relay.turns()
        await pair.acquire()
        await pair.release()
    return (relay.turns() - before) / HOLDS
