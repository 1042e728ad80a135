"""The line: arrival order, wake-ups, reservations, and those who do not come."""

from __future__ import annotations

import asyncio

from holdfast.claim import Busy, Claim, Grant
from holdfast.core.contract import DIRECT_GRANT_SECONDS, Guarantee
from holdfast.io.clock import now
from holdfast.testing.contract.bench import ACROSS, SOON, Bench, Peer, contract, in_grace

__all__: list[str] = []

FIFO = Guarantee.FIFO


@contract.rule(FIFO)
async def the_line_keeps_arrival_order(bench: Bench) -> None:
    """Places are counted from the front, a repeated attempt keeps its own, grants follow them."""
    holder, peers = bench.peer(), [bench.peer() for _ in range(3)]
    await in_grace(lambda name: _come_in_order(bench, holder, peers, name))


async def _come_in_order(bench: Bench, holder: Peer, peers: list[Peer], name: str) -> None:
    grant = await holder.take(bench.claim(name))
    claims = [bench.claim(name) for _ in peers]
    for place, (peer, claim) in enumerate(zip(peers, claims, strict=True)):
        assert (await peer.queue(claim)).place == place
    for place, (peer, claim) in enumerate(zip(peers, claims, strict=True)):
        assert (await peer.queue(claim)).place == place
    last = grant.token
    assert await holder.release(grant)
    for index, (peer, claim) in enumerate(zip(peers, claims, strict=True)):
        for later, later_claim in list(zip(peers, claims, strict=True))[index + 1 :]:
            await later.queue(later_claim)
        taken = await peer.get(claim)
        assert taken.token > last
        last = taken.token
        assert await peer.release(taken)


@contract.rule()
async def a_release_wakes_the_waiter(bench: Bench) -> None:
    """A wait ends with the hold, long before it would by itself; twenty hand-overs in a row."""
    peers = [bench.peer(), bench.peer()]
    grant = await peers[0].take(bench.claim())
    for turn in range(20):
        giver, taker = peers[turn % 2], peers[(turn + 1) % 2]
        claim = bench.claim()
        getting = asyncio.create_task(taker.get(claim, ACROSS))
        await _has_come(bench, giver, claim, getting)
        began = now()
        assert await giver.release(grant)
        grant = await getting
        assert now() - began < SOON


async def _has_come(bench: Bench, peer: Peer, claim: Claim, getting: asyncio.Task[Grant]) -> None:
    if FIFO in peer.store.guarantees:
        await bench.in_line(peer, claim.name, 1)
    else:
        await asyncio.wait([getting], timeout=0.05)


@contract.rule()
async def a_wake_up_may_bring_the_grant(bench: Bench) -> None:
    """If it does, that is for a moment, and another attempt gets the same for the whole ttl; unless
    the waiter itself has asked for it, and knows since when it is certain."""
    ours, theirs = bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    claim = bench.claim()
    assert await theirs.wait(claim, await theirs.queue(claim), now()) is None  # begins to listen
    busy = await theirs.queue(claim)
    waiting = asyncio.create_task(theirs.wait(claim, busy, now() + ACROSS))
    await asyncio.wait([waiting], timeout=0.05)
    assert await ours.release(grant)
    brought = await waiting
    taken = await theirs.get(claim)
    assert taken.token > grant.token
    if brought is not None:
        assert (brought.claim, brought.token) == (taken.claim, taken.token)
        assert brought.seconds is not None or brought.since is not None
    assert await theirs.release(taken)


@contract.rule()
async def all_waiters_are_served(bench: Bench) -> None:
    """Many waiters of several processes are all served by wake-ups alone."""
    peers = [bench.peer() for _ in range(3)]
    first = await peers[0].take(bench.claim())
    tokens: list[int] = []

    async def serve(peer: Peer) -> None:
        grant = await peer.get(bench.claim(), ACROSS)
        tokens.append(grant.token)
        assert await peer.release(grant)

    tasks = [asyncio.create_task(serve(peer)) for peer in peers for _ in range(5)]
    await asyncio.wait(tasks, timeout=0.1)
    assert not tokens
    assert await peers[0].release(first)
    await asyncio.gather(*tasks)
    assert len(tokens) == 15
    assert tokens == sorted(set(tokens))


@contract.rule(sleeps=True)
async def a_wait_ends_by_its_deadline(bench: Bench) -> None:
    """A wait for a name that is not freed returns at ``until`` at the latest."""
    ours, theirs = bench.peer(), bench.peer()
    await ours.take(bench.claim())
    claim = bench.claim()
    deadline = now() + 0.5
    while now() < deadline:
        busy = await theirs.queue(claim)
        await theirs.wait(claim, busy, deadline)
    assert now() < deadline + SOON


@contract.rule(sleeps=True)
async def a_nudge_ends_a_wait(bench: Bench) -> None:
    """``nudge`` makes the wait for its claim return, and no other."""
    ours, theirs = bench.peer(), bench.peer()
    await ours.take(bench.claim())
    nudged, other = bench.claim(), bench.claim()
    ends = {claim.owner: asyncio.Event() for claim in (nudged, other)}

    async def wait(claim: Claim) -> None:
        until = now() + ACROSS
        while not ends[claim.owner].is_set():
            await theirs.wait(claim, await theirs.queue(claim), until)

    tasks = [asyncio.create_task(wait(claim)) for claim in (nudged, other)]
    await asyncio.wait(tasks, timeout=0.3)
    ends[nudged.owner].set()
    theirs.nudge(nudged)
    await asyncio.wait_for(tasks[0], SOON)
    assert not tasks[1].done()
    ends[other.owner].set()
    theirs.nudge(other)
    await asyncio.wait_for(tasks[1], SOON)


@contract.rule(FIFO)
async def nobody_barges_in(bench: Bench) -> None:
    """A freed name is reserved for the first in line: neither joining nor trying gets it."""
    ours, first, third = bench.peer(), bench.peer(), bench.peer()

    async def reserved(name: str) -> None:
        grant = await ours.take(bench.claim(name))
        claim = bench.claim(name)
        await first.queue(claim)
        assert await ours.release(grant)
        assert isinstance(await third.attempt(bench.claim(name), join=False), Busy)
        assert isinstance(await ours.attempt(bench.claim(name), join=True), Busy)
        assert (await first.get(claim)).token > grant.token

    await in_grace(reserved)


@contract.rule(FIFO, sleeps=True)
async def who_does_not_come_is_skipped(bench: Bench) -> None:
    """A waiter that was woken and does not come loses its turn after its grace, or what it was
    granted with the wake-up after that."""
    ours, absent, second = bench.peer(), bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    gone = bench.claim()
    await absent.queue(gone)
    claim = bench.claim()
    assert (await second.queue(claim)).place == 1
    assert await ours.release(grant)
    await second.get(claim, DIRECT_GRANT_SECONDS + SOON)
    assert isinstance(await absent.attempt(gone, join=False), Busy)


@contract.rule(FIFO)
async def abandoning_a_turn_passes_it_on(bench: Bench) -> None:
    """A woken waiter that abandons its claim lets the next one in at once."""
    ours, first, second = bench.peer(), bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    gone, claim = bench.claim(), bench.claim()
    await first.queue(gone)
    getting = asyncio.create_task(second.get(claim, ACROSS))
    await bench.in_line(ours, "name", 2)
    assert await ours.release(grant)
    await first.abandon(gone)
    await asyncio.wait_for(getting, SOON)
    assert (await ours.look("name")).waiters == ()


@contract.rule()
async def abandoning_a_hold_lets_the_next_in(bench: Bench) -> None:
    """``abandon`` of a claim that was granted ends the hold and wakes the next."""
    ours, theirs = bench.peer(), bench.peer()
    claim = bench.claim()
    grant = await ours.take(claim)
    getting = asyncio.create_task(theirs.get(bench.claim(), ACROSS))
    await _has_come(bench, ours, claim, getting)
    await ours.abandon(claim)
    assert (await asyncio.wait_for(getting, SOON)).token > grant.token
    assert await ours.release(grant) is False


@contract.rule(FIFO)
async def abandoning_leaves_no_trace(bench: Bench) -> None:
    """A waiter that left is not shown, has no place, and comes back as the last."""
    ours, theirs = bench.peer(), bench.peer()
    await ours.take(bench.claim())
    gone, stays = bench.claim(), bench.claim()
    await theirs.queue(gone)
    assert (await theirs.queue(stays)).place == 1
    await theirs.renewer.abandon(gone)
    await theirs.abandon(bench.claim())  # a claim that the store never had
    assert len((await ours.look("name")).waiters) == 1
    assert (await theirs.queue(stays)).place == 0
    assert (await theirs.queue(gone)).place == 1


@contract.rule()
async def exchange_hands_over(bench: Bench) -> None:
    """Release and attempt in one: granted to the next of this process if nobody is in front."""
    peer = bench.peer()
    if not peer.exchanges:
        return
    grant = await peer.take(bench.claim())
    was_ours, answer = await peer.exchange(grant, bench.claim())
    assert was_ours is True
    assert isinstance(answer, Grant)
    assert answer.token > grant.token
    was_ours, again = await peer.exchange(grant, bench.claim())
    assert was_ours is False
    assert isinstance(again, Busy)
    assert await peer.release(answer) is True


@contract.rule(FIFO)
async def exchange_does_not_deafen_a_waiter(bench: Bench) -> None:
    """An exchange for a claim whose wait is under way does not cost it its wake-up."""
    ours, theirs = bench.peer(), bench.peer()
    if not ours.exchanges:
        return
    grant = await ours.take(bench.claim())
    in_front, claim = bench.claim(), bench.claim()
    await theirs.queue(in_front)
    getting = asyncio.create_task(ours.get(claim, ACROSS))
    await bench.in_line(theirs, "name", 2)
    await asyncio.wait([getting], timeout=0.2)  # until it is in its wait
    was_ours, answer = await ours.exchange(grant, claim)
    assert was_ours is True
    assert isinstance(answer, Busy)
    taken = await theirs.get(in_front)
    assert await theirs.release(taken)
    assert (await asyncio.wait_for(getting, SOON)).token > taken.token


@contract.rule(FIFO)
async def exchange_does_not_overtake(bench: Bench) -> None:
    """If another process stands in front, exchange wakes it and joins the line behind it."""
    ours, theirs = bench.peer(), bench.peer()
    if not ours.exchanges:
        return
    grant = await ours.take(bench.claim())
    getting = asyncio.create_task(theirs.get(bench.claim(), ACROSS))
    await bench.in_line(ours, "name", 1)
    claim = bench.claim()
    was_ours, answer = await ours.exchange(grant, claim)
    assert was_ours is True
    assert isinstance(answer, Busy)
    taken = await asyncio.wait_for(getting, SOON)
    waiting = asyncio.create_task(ours.get(claim, ACROSS))
    assert await theirs.release(taken)
    assert (await asyncio.wait_for(waiting, SOON)).token > taken.token
