"""Waiters that give up leave gaps in the queue. However many there were, a name stays as small, and
a script as cheap, as its waiters are. Counted at the server."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator

import pytest

from holdfast.claim import Claim, Grant, Mode, read_label
from holdfast.stores.redis import scripts
from holdfast.stores.redis.scripts import PORTION, REMEMBER_BYTES
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench, Peer
from servers.redis import RedisServer
from stores.redis.helpers import blocking_and_asyncio, over

READS = ("hget", "hmget", "hgetall")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server that only this test uses."""
    with RedisServer() as server:
        yield server


def reads(server: RedisServer) -> int:
    """How often a server has read fields of a hash, for clients or in scripts."""
    return sum(
        int(line.split("calls=")[1].split(",")[0])
        for line in str(server.ask("INFO", "commandstats")).splitlines()
        if line.startswith(tuple(f"cmdstat_{command}:" for command in READS))
    )


async def _give_up(bench: Bench, peer: Peer, times: int) -> None:
    """Waiters that overlap: one joins the queue before the last one leaves it."""
    last = bench.claim()
    await peer.queue(last)
    for _ in range(times):
        waiter = bench.claim()
        await peer.queue(waiter)
        await peer.abandon(last)
        last = waiter


async def _look_reads(server: RedisServer, peer: Peer, waiters: int) -> int:
    before = reads(server)
    assert len((await peer.look("name")).waiters) == waiters
    return reads(server) - before


@blocking_and_asyncio
def test_waiters_that_gave_up_cost_nothing(
    server: RedisServer, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = scripts._CONSTANTS.replace(f"= {REMEMBER_BYTES}, {PORTION}\n", f"= {REMEMBER_BYTES}, 4\n")
    assert few != scripts._CONSTANTS
    monkeypatch.setattr(scripts, "_CONSTANTS", few)  # a command reads at most four fields

    async def body(bench: Bench) -> None:
        peer, key = bench.peer(), f"{bench.namespace}:{{name}}"
        held, patient = await peer.take(bench.claim()), bench.claim()
        await peer.queue(patient)
        await _give_up(bench, peer, 10)
        fields, cost = server.ask("HLEN", key), await _look_reads(server, peer, 2)
        await _give_up(bench, peer, 100)
        added = 2 + 2  # the last waiter of each round is still in the queue; a gap between them
        assert int(str(server.ask("HLEN", key))) <= int(str(fields)) + added
        assert await _look_reads(server, peer, 3) <= cost + added
        before = reads(server)
        assert await peer.release(held)
        assert reads(server) - before <= 8
        assert (await peer.get(patient)).token > held.token

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_an_inspection_reads_a_bounded_number_of_entries(
    server: RedisServer, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.stores.redis.backend.LOOK_CAP", 5)

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        for _ in range(40):
            await peer.take(bench.claim(mode=Mode.SHARED))
        for _ in range(40):
            await peer.queue(bench.claim())
        before = reads(server)
        found = await peer.look("name")
        assert (len(found.holders), len(found.waiters)) == (5, 5)
        assert reads(server) - before <= 4 * 5 * 2 + 5 + 5

    over(server.url, flavour, body)


async def _check_queue(peer: Peer, queue: list[Claim]) -> None:
    shown = [waiter.note for waiter in (await peer.look("name")).waiters]
    assert shown == [read_label(claim.label)[3] for claim in queue]


def _die(server: RedisServer, key: str, claim: Claim) -> None:
    """Makes the entry of a waiter as old as that of a process that died."""
    words = str(server.ask("HGET", key, f"w:{claim.owner}")).split(" ")
    words[3] = "1"
    server.ask("HSET", key, f"w:{claim.owner}", " ".join(words))


async def _any_step(
    server: RedisServer,
    peer: Peer,
    bench: Bench,
    choice: random.Random,
    queue: list[Claim],
    held: Grant,
) -> Grant:
    """A waiter joins, gives up or dies, or the holder releases and the first waiter is granted."""
    step = choice.random()
    if not queue or step < 0.5:
        queue.append(bench.claim(note=secrets.token_hex(4)))
        await peer.queue(queue[-1])
    elif step < 0.8:
        await peer.abandon(queue.pop(choice.randrange(len(queue))))
    elif step < 0.9:
        key = f"{bench.namespace}:{{name}}"
        _die(server, key, queue.pop(choice.randrange(len(queue))))
    else:
        await peer.release(held)
        return await peer.take(queue.pop(0))
    return held


@pytest.mark.parametrize("seed", range(4))
def test_gaps_keep_the_order_of_the_queue(server: RedisServer, seed: int) -> None:
    """Any order of joining, giving up, dying and granting: the queue is as in a list, and no field
    of it is left at the end."""

    async def body(bench: Bench) -> None:
        peer, choice = bench.peer(), random.Random(seed)
        key, queue = f"{bench.namespace}:{{name}}", list[Claim]()
        held = await peer.take(bench.claim())
        for _ in range(300):
            held = await _any_step(server, peer, bench, choice, queue, held)
            await _check_queue(peer, queue)
        while queue:
            await peer.abandon(queue.pop(choice.randrange(len(queue))))
        await peer.release(held)
        await peer.release(await peer.take(bench.claim()))
        left = server.ask("HKEYS", key)
        assert isinstance(left, list)
        assert [field for field in left if str(field)[:2] in ("w:", "l:", "j:")] == []

    over(server.url, Flavour.BLOCKING, body)
