"""Semaphores: some of a name's slots."""

from __future__ import annotations

import asyncio

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.contract import GRACE_SECONDS, Guarantee
from holdfast.errors import LimitMismatch
from holdfast.testing.contract.bench import ACROSS, SOON, Bench, Peer, contract

__all__: list[str] = []

SLOTS, FIFO = Guarantee.SLOTS, Guarantee.FIFO


def _slots(bench: Bench, limit: int = 3, weight: int = 1) -> Claim:
    return bench.claim(mode=Mode.SLOTS, limit=limit, weight=weight)


@contract.rule(SLOTS)
async def slots_are_distinct(bench: Bench) -> None:
    """As many as the limit fit, each on a slot of its own; the next one does not."""
    ours, theirs = bench.peer(), bench.peer()
    grants = [await peer.take(_slots(bench)) for peer in (ours, theirs, ours)]
    assert sorted(grant.slots for grant in grants) == [(0,), (1,), (2,)]
    assert isinstance(await theirs.attempt(_slots(bench), join=False), Busy)
    held = {holder.slots for holder in (await theirs.look("name")).holders}
    assert held == {(0,), (1,), (2,)}
    freed = grants[1]
    assert await theirs.release(freed)
    again = await ours.take(_slots(bench))
    assert again.slots == freed.slots
    assert again.token > freed.token


@contract.rule(SLOTS)
async def several_permits_are_one_hold(bench: Bench) -> None:
    """A claim of two slots gets two or none, and gives both back."""
    ours, theirs = bench.peer(), bench.peer()
    pair = await ours.take(_slots(bench, weight=2))
    assert len(set(pair.slots)) == 2
    assert isinstance(await theirs.attempt(_slots(bench, weight=2), join=False), Busy)
    single = await theirs.take(_slots(bench))
    assert not set(single.slots) & set(pair.slots)
    assert await ours.release(pair)
    await theirs.take(_slots(bench, weight=2))


@contract.rule(SLOTS, FIFO)
async def a_big_claim_is_not_overtaken(bench: Bench) -> None:
    """A claim for all slots waits for them, and later small ones wait behind it."""
    ours, theirs, third = bench.peer(), bench.peer(), bench.peer()
    first, second = await ours.take(_slots(bench)), await ours.take(_slots(bench))
    getting = asyncio.create_task(theirs.get(_slots(bench, weight=3), ACROSS))
    await bench.in_line(ours, "name", 1)
    assert (await third.queue(_slots(bench))).place == 1
    assert await ours.release(first)
    assert isinstance(await third.attempt(_slots(bench), join=False), Busy)
    assert await ours.release(second)
    assert (await asyncio.wait_for(getting, SOON)).slots == (0, 1, 2)


@contract.rule(SLOTS)
async def tokens_of_a_slot_grow_in_the_order_of_its_holds(bench: Bench) -> None:
    """A later hold of a slot has a higher token than an earlier one, also if its claim waited
    longer: a resource fences slot by slot."""
    ours, first, second = bench.peer(), bench.peer(), bench.peer()
    highest: dict[int, int] = {}

    def enter(grant: Grant) -> None:
        assert grant.slots
        for slot in grant.slots:
            assert grant.token > highest.get(slot, 0), f"slot {slot} was held with a higher token"
            highest[slot] = grant.token

    async def use(peer: Peer, claim: Claim) -> None:
        grant = await peer.get(claim, ACROSS)
        enter(grant)
        assert await peer.release(grant)

    for _ in range(3):
        pair = await ours.take(_slots(bench, limit=2, weight=2))
        enter(pair)
        early, late = _slots(bench, limit=2), _slots(bench, limit=2)
        await first.queue(early)
        await second.queue(late)
        assert await ours.release(pair)
        turns = [(first, early), (second, late)]
        if isinstance(await second.attempt(late), Grant):  # both fit, and nobody has to come first
            turns.reverse()
        # At the same time: without FIFO the second one may be the first in the store's queue.
        await asyncio.gather(*(use(peer, claim) for peer, claim in turns))


@contract.rule(SLOTS)
async def a_freed_slot_wakes_a_waiter(bench: Bench) -> None:
    """Waiters for slots are served by wake-ups alone, and never more hold than fit."""
    peers = [bench.peer() for _ in range(3)]
    holding: set[int] = set()

    async def serve(peer: Peer) -> None:
        for _ in range(3):
            grant = await peer.get(_slots(bench, limit=2), ACROSS)
            assert not holding & set(grant.slots)
            holding.update(grant.slots)
            await asyncio.sleep(0)
            holding.difference_update(grant.slots)
            assert await peer.release(grant)

    await asyncio.wait_for(asyncio.gather(*(serve(p) for p in peers for _ in range(2))), ACROSS)


@contract.rule(SLOTS)
async def a_limit_binds_while_in_use(bench: Bench) -> None:
    """Another limit, or a lock on the same name, is refused while anybody holds it."""
    ours, theirs = bench.peer(), bench.peer()
    grant = await ours.take(_slots(bench, limit=3))
    await _refused(theirs, _slots(bench, limit=4))
    await _refused(theirs, bench.claim())
    if Guarantee.SHARED in theirs.store.guarantees:
        await _refused(theirs, bench.claim(mode=Mode.SHARED))
    info = await theirs.look("name")
    assert (info.limit, len(info.holders), info.waiters) == (3, 1, ())
    assert await ours.release(grant)
    taken = await theirs.take(_slots(bench, limit=4))
    assert await theirs.release(taken)
    await theirs.take(bench.claim())
    await _refused(ours, _slots(bench, limit=4))


async def _refused(peer: Peer, claim: Claim) -> None:
    for join in (True, False):
        try:
            answer = await peer.attempt(claim, join=join)
        except LimitMismatch:
            continue
        raise AssertionError(f"a claim that disagrees was answered with {answer}")


@contract.rule(SLOTS, FIFO, sleeps=True)
async def who_was_skipped_takes_no_slot(bench: Bench) -> None:
    """A waiter that did not come for its slot and lost it joins the queue again when it
    attempts."""
    ours, absent, second = bench.peer(), bench.peer(), bench.peer()
    grant = await ours.take(_slots(bench, limit=1))
    late, claim = _slots(bench, limit=1), _slots(bench, limit=1)
    await absent.queue(late)
    assert (await second.queue(claim)).place == 1
    assert await ours.release(grant)
    await second.get(claim, GRACE_SECONDS + SOON)
    assert isinstance(await absent.attempt(late), Busy)
    assert len((await ours.look("name")).holders) == 1
