"""Leader election: a lock with an audience."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from holdfast.errors import NotHeld
from holdfast.testing.conformance.bench import SOON, Bench, calmly, conformance, raises, within

if TYPE_CHECKING:
    from holdfast.locks_async import AsyncLocks

__all__: list[str] = []


@conformance.rule()
async def one_leads(bench: Bench) -> None:
    """A campaign is a block that is entered as the leader; everybody sees who it is."""
    ours, theirs = bench.client(), bench.client()
    assert await theirs.election("boss").leader() is None
    async with ours.election("boss", note="first").campaign() as lease:
        leader = await theirs.election("boss").leader()
        assert leader is not None
        assert (leader.token, leader.note, leader.pid) == (lease.token, "first", os.getpid())
        assert (
            await calmly(lambda s: theirs.election("boss", timeout=s).campaign().acquire()) is None
        )
    assert await theirs.election("boss").leader() is None


@conformance.rule()
async def the_next_one_takes_over(bench: Bench) -> None:
    """When a leader resigns, who campaigns leads."""
    ours, theirs = bench.client(), bench.client()

    async def campaign() -> int:
        async with theirs.election("boss", timeout=SOON).campaign() as lease:
            return lease.token

    election = ours.election("boss")
    with raises(NotHeld):
        await election.resign()
    async with election.campaign() as lease:
        waiting = asyncio.create_task(campaign())
        await asyncio.wait([waiting], timeout=0.1)
        await election.resign()
        assert not lease.held
        assert await within(SOON, waiting) > lease.token


@conformance.rule(sleeps=True)
async def an_observer_sees_each_leader(bench: Bench) -> None:
    """``observe`` gives the leader, then each that follows, and ``None`` while there is none."""
    ours, watching = bench.client(), bench.client()
    seen: asyncio.Queue[str | None] = asyncio.Queue()
    observing = asyncio.create_task(_observe(watching, seen))
    assert await within(SOON, seen.get()) is None
    async with ours.election("boss", note="first").campaign():
        assert await within(SOON, seen.get()) == "first"
    async with ours.election("boss", note="second").campaign():
        while (note := await within(SOON, seen.get())) != "second":
            assert note is None
    await within(2 * SOON, observing)


async def _observe(client: AsyncLocks, seen: asyncio.Queue[str | None]) -> None:
    async for leader in client.election("boss").observe(timeout=SOON):
        seen.put_nowait(leader.note if leader else None)
        if leader is not None and leader.note == "second":
            return
