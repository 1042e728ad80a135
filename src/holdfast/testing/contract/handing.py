"""Lease hand-over, below the clients: one conditional step, a higher token, no gap."""

from __future__ import annotations

import asyncio

from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import GRACE_SECONDS, Guarantee
from holdfast.testing.contract.bench import ACROSS, SOON, Bench, Peer, contract
from holdfast.testing.guarantees import NEEDS_MAJORITY, row_of

__all__: list[str] = []

LIMIT = 3


def _successor(bench: Bench, claim: Claim) -> Claim:
    """The claim of a taker: another owner, all else as it was."""
    return bench.claim(
        claim.name, claim.mode, weight=claim.weight, limit=claim.limit, ttl=claim.ttl, note="taker"
    )


async def _taken(bench: Bench, ours: Peer, theirs: Peer, grant: Grant) -> Grant:
    handed = await ours.hand_over(grant)
    taken = await theirs.take_over(handed, _successor(bench, grant.claim))
    assert taken is not None, "a hold that was handed over could not be taken over"
    return taken


@contract.rule(hand_over=True)
async def a_hold_changes_its_owner(bench: Bench) -> None:
    """The taker holds, with a higher token. What the old owner sends later changes nothing."""
    ours, theirs, third = bench.peer(), bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    taken = await _taken(bench, ours, theirs, grant)
    assert taken.token > grant.token
    assert not (await theirs.renew([taken])).lost
    assert set((await ours.renew([grant])).lost) == {grant.claim.owner}
    await _late(ours, grant)
    assert await ours.release(grant) is False
    await ours.abandon(grant.claim)
    (holder,) = (await third.look("name")).holders
    assert (holder.token, holder.note) == (taken.token, "taker")
    await third.queue(bench.claim())
    assert not (await theirs.renew([taken])).lost
    assert await theirs.release(taken) is True


async def _late(ours: Peer, grant: Grant) -> None:
    """A renewal and an ``extend`` that arrive after the hand-over."""
    for ttl in (grant.claim.ttl / 2, grant.claim.ttl * 2):
        late = grant._replace(claim=grant.claim._replace(ttl=ttl))
        for shorten in (False, True):
            assert set((await ours.extend(late, shorten=shorten)).lost) == {grant.claim.owner}


@contract.rule(hand_over=True)
async def it_works_once(bench: Bench) -> None:
    """Of several takers one gets the hold. The same taker gets it again, with the same token; with
    a higher one where a majority has to agree on it."""
    ours, theirs, others = bench.peer(), bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    handed, claim = await ours.hand_over(grant), _successor(bench, grant.claim)
    taken = await theirs.take_over(handed, claim)
    assert taken is not None
    for peer in (theirs, others, ours):
        assert await peer.take_over(handed, _successor(bench, grant.claim)) is None
    again = await theirs.take_over(handed, claim)
    assert again is not None
    assert again.claim.owner == taken.claim.owner
    higher = again.token > taken.token and row_of(bench.harness) in NEEDS_MAJORITY
    assert again.token == taken.token or higher
    assert not (await theirs.renew([again])).lost
    assert await theirs.release(again) is True
    assert await theirs.take_over(handed, _successor(bench, grant.claim)) is None


@contract.rule(hand_over=True)
async def takers_at_once(bench: Bench) -> None:
    """Takers of several processes, and several of each, at the same time: exactly one; or none, in
    a store where they can divide the servers among them."""
    ours, takers = bench.peer(), [bench.peer() for _ in range(3)]
    grant = await ours.take(bench.claim())
    handed = await ours.hand_over(grant)
    claims = [_successor(bench, grant.claim) for _ in range(6)]
    taking = [takers[n % 3].take_over(handed, claim) for n, claim in enumerate(claims)]
    found = await asyncio.gather(*map(asyncio.ensure_future, taking))
    won = {n: each for n, each in enumerate(found) if each is not None}
    assert len(won) == 1 or (not won and row_of(bench.harness) in NEEDS_MAJORITY)
    for number, claim in enumerate(claims):
        if number not in won:  # what a taker does whose request was not answered
            await takers[number % 3].abandon(claim)
    for number, taken in won.items():
        assert [holder.token for holder in (await ours.look("name")).holders] == [taken.token]
        assert await takers[number % 3].release(taken) is True


@contract.rule(hand_over=True)
async def a_wrong_text_takes_nothing(bench: Bench) -> None:
    """Another token is refused, and another owner, unless the store finds the hold by what it gave
    for the text; and the hold stays."""
    ours, theirs = bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    handed = await ours.hand_over(grant)
    claim = _successor(bench, grant.claim)
    other = handed._replace(claim=handed.claim._replace(owner=bench.claim().owner))
    for wrong in (handed._replace(token=grant.token + 1), *([] if handed.ref else [other])):
        assert await theirs.take_over(wrong, claim) is None
    assert [holder.token for holder in (await theirs.look("name")).holders] == [grant.token]
    taken = await theirs.take_over(handed, claim)
    assert taken is not None
    assert await theirs.release(taken) is True


@contract.rule(hand_over=True)
async def a_hold_that_is_over_is_not_taken(bench: Bench) -> None:
    """After a release or a break there is nothing to hand over, and nothing to take."""
    ours, theirs = bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    handed = await ours.hand_over(grant)
    assert await theirs.revoke("name") == [grant.token]
    assert await theirs.take_over(handed, _successor(bench, grant.claim)) is None
    other = await theirs.take(bench.claim())
    assert await theirs.take_over(handed, _successor(bench, grant.claim)) is None
    assert await theirs.release(other) is True


@contract.rule(hand_over=True)
async def a_taker_can_be_abandoned(bench: Bench) -> None:
    """A taker whose outcome is unknown leaves no hold, by its claim alone."""
    ours, theirs = bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    handed, claim = await ours.hand_over(grant), _successor(bench, grant.claim)
    assert await theirs.take_over(handed, claim) is not None
    await theirs.abandon(claim)
    assert (await ours.look("name")).holders == ()
    assert await theirs.take_over(handed, _successor(bench, grant.claim)) is None


@contract.rule(Guarantee.FIFO, hand_over=True)
async def waiters_stay_behind(bench: Bench) -> None:
    """A waiter gets the name neither before nor because it is taken over. Its token is higher than
    the taker's, although it came before."""
    ours, theirs, waiting = bench.peer(), bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    claim = bench.claim()
    await waiting.queue(claim)
    getting = asyncio.ensure_future(waiting.get(claim, ACROSS))
    handed = await ours.hand_over(grant)
    await asyncio.wait([getting], timeout=0.2)
    taken = await theirs.take_over(handed, _successor(bench, grant.claim))
    assert taken is not None
    await asyncio.wait([getting], timeout=GRACE_SECONDS / 4)
    assert not getting.done(), "a waiter got the name beside the taker"
    assert await theirs.release(taken) is True
    assert (await asyncio.wait_for(getting, 2 * SOON)).token > taken.token


@contract.rule(Guarantee.SHARED, Guarantee.SLOTS, hand_over=True)
async def it_works_once_in_every_mode(bench: Bench) -> None:
    """The stored token of readers and slots is the new one, and the next taker must name it."""
    ours, theirs = bench.peer(), bench.peer()
    claims = (
        bench.claim("shared", mode=Mode.SHARED),
        bench.claim("slots", mode=Mode.SLOTS, weight=2, limit=LIMIT),
    )
    for claim in claims:
        grant = await ours.take(claim)
        handed = await ours.hand_over(grant)
        taken = await theirs.take_over(handed, _successor(bench, claim))
        assert taken is not None
        assert await ours.take_over(handed, _successor(bench, claim)) is None
        (holder,) = (await ours.look(claim.name)).holders
        assert holder.token == taken.token > grant.token
        assert not (await theirs.renew([taken])).lost
        again = await _taken(bench, theirs, ours, taken)
        assert again.token > taken.token
        assert await ours.release(again) is True


@contract.rule(Guarantee.SHARED, hand_over=True)
async def a_reader_hands_over(bench: Bench) -> None:
    """Beside other readers, and with a writer behind them, which waits for the taker, too."""
    ours, theirs, others = bench.peer(), bench.peer(), bench.peer()
    grant, beside = [await p.take(bench.claim(mode=Mode.SHARED)) for p in (ours, others)]
    writer = bench.claim()
    await others.queue(writer)
    taken = await _taken(bench, ours, theirs, grant)
    assert taken.token > grant.token
    assert await others.release(beside) is True
    await others.queue(writer)
    assert await theirs.release(taken) is True
    assert (await others.get(writer)).token > taken.token


@contract.rule(Guarantee.SLOTS, hand_over=True)
async def slots_stay_the_same(bench: Bench) -> None:
    """The taker has the slots of the old owner, and no other claim gets them."""
    ours, theirs, others = bench.peer(), bench.peer(), bench.peer()

    def slots(weight: int) -> Claim:
        return bench.claim(mode=Mode.SLOTS, weight=weight, limit=LIMIT)

    beside, grant = await others.take(slots(1)), await ours.take(slots(2))
    taken = await _taken(bench, ours, theirs, grant)
    assert (taken.slots, taken.token > grant.token) == (grant.slots, True)
    assert not (await theirs.renew([taken])).lost
    waiter = slots(1)
    await others.queue(waiter)
    held = {holder.token: holder.slots for holder in (await ours.look("name")).holders}
    assert held == {beside.token: beside.slots, taken.token: taken.slots}
    assert await theirs.release(taken) is True
    assert (await others.get(waiter)).token > taken.token
