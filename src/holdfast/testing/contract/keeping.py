"""Renewal, expiry and revocation."""

from __future__ import annotations

import asyncio

from holdfast.claim import Busy, Grant, Mode
from holdfast.core.contract import Guarantee, Waiting
from holdfast.core.hold import certain_seconds
from holdfast.io.clock import now
from holdfast.testing.contract.bench import ACROSS, SOON, Bench, Peer, contract
from holdfast.testing.stalls import in_some_try

__all__: list[str] = []

LONGER, SHORTER = 40.0, 20.0
"""Two ttls that every store can honour, and that don't end during a test."""


@contract.rule(sleeps=True)
async def a_hold_ends_with_its_ttl(bench: Bench) -> None:
    """A hold that nobody renews ends by itself, not before its time and not long after."""
    ours, theirs = bench.peer(), bench.peer()
    ttl = bench.harness.ttl
    began = now()
    grant = await ours.take(bench.claim(ttl=ttl))
    next_one = await theirs.get(bench.claim(), ttl + 1.0 + bench.harness.extra_recovery + SOON)
    assert now() - began >= ttl * 0.99 - 0.002
    assert next_one.token > grant.token
    renewal = await ours.renew([grant])
    assert set(renewal.lost) == {grant.claim.owner}
    assert await ours.release(grant) is False
    assert await theirs.release(next_one) is True


@contract.rule(sleeps=True)
async def renewing_keeps_a_hold(bench: Bench) -> None:
    """A hold that is renewed in time outlives its ttl, in a batch as alone."""
    ours, theirs = bench.peer(), bench.peer()
    await in_some_try(
        lambda: _outlives(bench, ours, theirs), "it was never renewed in time for its ttl"
    )


async def _outlives(bench: Bench, ours: Peer, theirs: Peer) -> bool:
    """Renews for longer than the ttl; false if it once came too late for its certain time."""
    ttl = bench.harness.ttl
    asked = now()
    grants = [await ours.take(bench.claim(f"name {n}", ttl=ttl)) for n in range(3)]
    certain = min(asked, *(grant.since or asked for grant in grants)) + certain_seconds(ttl)
    ends = now() + ttl * 1.5
    while now() < ends:
        sent = now()
        renewal = await ours.renew(grants)
        assert not renewal.unknown
        assert not renewal.lost or now() >= certain
        if renewal.lost:
            return False
        since = sent if renewal.since is None else min(sent, renewal.since)
        certain = since + certain_seconds(ttl)
        answer = await theirs.attempt(bench.claim("name 1"), join=False)
        assert isinstance(answer, Busy) or now() >= certain
        await asyncio.sleep(ttl / 4)
    released = [await ours.release(grant) for grant in grants]
    assert all(released) or now() >= certain
    return all(released)


@contract.rule()
async def an_end_only_grows(bench: Bench) -> None:
    """A request may arrive after later ones: neither a renewal nor an attempt of a shorter ttl
    brings the end of a hold forward."""
    await _grows(bench, Mode.EXCLUSIVE)


@contract.rule(Guarantee.SHARED)
async def the_end_of_a_reader_only_grows(bench: Bench) -> None:
    """The same for holds that are not alone."""
    await _grows(bench, Mode.SHARED)


async def _grows(bench: Bench, mode: Mode) -> None:
    peer = bench.peer()
    grant = await peer.take(bench.claim(mode=mode, ttl=LONGER))
    late = grant._replace(claim=grant.claim._replace(ttl=SHORTER))
    renewal = await peer.renew([late])
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert await _left(peer) > SHORTER
    again = await peer.attempt(late.claim)
    assert isinstance(again, Grant)
    assert again.token == grant.token
    assert await _left(peer) > SHORTER
    assert await peer.release(grant) is True


@contract.rule()
async def an_owner_shortens_its_hold(bench: Bench) -> None:
    """``extend`` with a shorter ttl keeps the hold, and lets it end sooner where the store can."""
    await _shortens(bench, Mode.EXCLUSIVE)


@contract.rule(Guarantee.SHARED)
async def a_reader_shortens_its_hold(bench: Bench) -> None:
    """The same for holds that are not alone."""
    await _shortens(bench, Mode.SHARED)


async def _shortens(bench: Bench, mode: Mode) -> None:
    peer = bench.peer()
    grant = await peer.take(bench.claim(mode=mode, ttl=LONGER))
    for ttl, shorten in ((SHORTER, True), (LONGER, False)):
        extended = grant._replace(claim=grant.claim._replace(ttl=ttl))
        renewal = await peer.extend(extended, shorten=shorten)
        assert (renewal.lost, renewal.unknown) == ({}, {})
        left = await _left(peer)
        if shorten and bench.harness.shortens:
            assert left <= SHORTER
        else:
            assert left > SHORTER
    assert await peer.release(grant) is True


async def _left(peer: Peer) -> float:
    """How long the store would keep the only hold without a renewal."""
    (holder,) = (await peer.look("name")).holders
    assert holder.remaining is not None
    return holder.remaining


@contract.rule()
async def a_batch_tells_them_apart(bench: Bench) -> None:
    """A batch of renewals names those that are lost and keeps the others."""
    peer = bench.peer()
    grants = [await peer.take(bench.claim(f"name {n}")) for n in range(40)]
    released = grants[::3]
    for grant in released:
        assert await peer.release(grant)
    renewal = await peer.renew(grants)
    assert set(renewal.lost) == {grant.claim.owner for grant in released}
    assert all(renewal.lost.values()), "a loss without a reason"
    assert not renewal.unknown


@contract.rule()
async def renewing_never_revives(bench: Bench) -> None:
    """Renewing an ended hold does not take the name from nobody, let alone from its holder."""
    ours, theirs = bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    assert await ours.release(grant)
    assert set((await ours.renew([grant])).lost) == {grant.claim.owner}
    taken = await theirs.take(bench.claim())
    assert set((await ours.renew([grant])).lost) == {grant.claim.owner}
    assert await theirs.release(taken) is True


@contract.rule(Guarantee.FIFO)
async def waits_are_refreshed(bench: Bench) -> None:
    """Waiting claims are refreshed with the number behind them; others are reported as
    forgotten."""
    ours, theirs = bench.peer(), bench.peer()
    await ours.take(bench.claim())
    claim, unknown = bench.claim(), bench.claim()
    await theirs.queue(claim)
    renewal = await theirs.renew([], [Waiting(claim, 7), Waiting(unknown, 0)])
    assert renewal.forgotten == {unknown.owner}
    assert [waiter.behind for waiter in (await ours.look("name")).waiters] == [7]


@contract.rule()
async def revoking_ends_a_hold(bench: Bench) -> None:
    """``revoke`` answers the tokens it ended; the holder learns it, the next token is higher."""
    ours, theirs = bench.peer(), bench.peer()
    assert await theirs.revoke("name") == []
    grant = await ours.take(bench.claim())
    assert await theirs.revoke("name") == [grant.token]
    assert set((await ours.renew([grant])).lost) == {grant.claim.owner}
    assert await ours.release(grant) is False
    assert (await theirs.take(bench.claim())).token > grant.token


@contract.rule()
async def revoking_lets_the_next_in(bench: Bench) -> None:
    """A waiter is woken when the hold in front of it is broken."""
    ours, theirs, third = bench.peer(), bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    getting = asyncio.create_task(theirs.get(bench.claim(), ACROSS))
    await asyncio.wait([getting], timeout=0.2)
    assert await third.revoke("name") == [grant.token]
    assert (await asyncio.wait_for(getting, SOON)).token > grant.token
