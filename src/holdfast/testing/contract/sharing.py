"""Readers and writers."""

from __future__ import annotations

import asyncio

from holdfast.claim import Busy, Mode
from holdfast.core.contract import Guarantee
from holdfast.testing.contract.bench import ACROSS, SOON, Bench, Peer, contract, in_grace

__all__: list[str] = []

SHARED, FIFO = Guarantee.SHARED, Guarantee.FIFO


@contract.rule(SHARED)
async def readers_hold_together(bench: Bench) -> None:
    """Any number of readers hold a name at once; a writer does not fit beside them."""
    ours, theirs = bench.peer(), bench.peer()
    readers = [await peer.take(bench.claim(mode=Mode.SHARED)) for peer in (ours, theirs, ours)]
    assert {holder.mode for holder in (await ours.look("name")).holders} == {Mode.SHARED}
    assert isinstance(await theirs.attempt(bench.claim(), join=False), Busy)
    for reader, peer in zip(readers, (ours, theirs, ours), strict=True):
        assert await peer.release(reader) is True
    writer = await theirs.take(bench.claim())
    assert writer.token > max(reader.token for reader in readers)


@contract.rule(SHARED)
async def a_writer_is_alone(bench: Bench) -> None:
    """Nobody reads while one writes; the readers come in with the writer's release."""
    ours, theirs = bench.peer(), bench.peer()
    writer = await ours.take(bench.claim())
    assert isinstance(await theirs.attempt(bench.claim(mode=Mode.SHARED), join=False), Busy)
    claims = [bench.claim(mode=Mode.SHARED) for _ in range(3)]
    getting = [asyncio.create_task(theirs.get(claim, ACROSS)) for claim in claims]
    await asyncio.wait(getting, timeout=0.1)
    assert await ours.release(writer)
    readers = await asyncio.wait_for(asyncio.gather(*getting), SOON)
    assert all(reader.token >= writer.token for reader in readers)


@contract.rule(SHARED, FIFO)
async def a_waiting_writer_is_not_overtaken(bench: Bench) -> None:
    """A reader that comes after a waiting writer waits behind it."""
    ours, theirs, third = bench.peer(), bench.peer(), bench.peer()
    reader = await ours.take(bench.claim(mode=Mode.SHARED))
    writing = asyncio.create_task(theirs.get(bench.claim(), ACROSS))
    await bench.in_line(ours, "name", 1)
    late = bench.claim(mode=Mode.SHARED)
    assert (await third.queue(late)).place == 1
    assert isinstance(await third.attempt(bench.claim(mode=Mode.SHARED), join=False), Busy)
    assert await ours.release(reader)
    writer = await asyncio.wait_for(writing, SOON)
    reading = asyncio.create_task(third.get(late, ACROSS))
    assert await theirs.release(writer)
    await asyncio.wait_for(reading, SOON)


@contract.rule(SHARED, FIFO)
async def readers_in_front_do_not_wait_for_each_other(bench: Bench) -> None:
    """All readers up to the next writer are woken by one release."""
    ours, theirs = bench.peer(), bench.peer()

    async def read_together(name: str) -> None:
        writer = await ours.take(bench.claim(name))
        claims = [bench.claim(name, Mode.SHARED) for _ in range(3)]
        for claim in claims:
            await theirs.queue(claim)
        assert (await ours.queue(bench.claim(name))).place == 3
        assert await ours.release(writer)
        for claim in reversed(claims):
            await theirs.get(claim)

    await in_grace(read_together)


@contract.rule(SHARED)
async def readers_and_writers_keep_coming(bench: Bench) -> None:
    """However they meet, all get in, no writer beside anybody, and nobody's wish outlives it."""
    peers = [bench.peer() for _ in range(3)]
    holding: list[Mode] = []

    async def serve(peer: Peer, number: int) -> None:
        for turn in range(9):
            mode = Mode.SHARED if (turn + number) % 3 else Mode.EXCLUSIVE
            grant = await peer.get(bench.claim(mode=mode), ACROSS)
            assert not (holding if mode is Mode.EXCLUSIVE else Mode.EXCLUSIVE in holding)
            holding.append(mode)
            await asyncio.sleep(0.001)
            holding.remove(mode)
            assert await peer.release(grant)

    served = (serve(peer, number) for number, peer in enumerate(peers * 2))
    await asyncio.wait_for(asyncio.gather(*served), ACROSS)
    for peer in peers:
        await peer.get(bench.claim(mode=Mode.SHARED), SOON)


@contract.rule(SHARED)
async def revoking_ends_all_readers(bench: Bench) -> None:
    """``revoke`` of a name that is read ends every hold."""
    ours, theirs = bench.peer(), bench.peer()
    readers = [await peer.take(bench.claim(mode=Mode.SHARED)) for peer in (ours, theirs)]
    assert sorted(await theirs.revoke("name")) == sorted(reader.token for reader in readers)
    assert len((await ours.renew(readers)).lost) == 2
    await theirs.take(bench.claim())
