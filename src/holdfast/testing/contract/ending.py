"""Probes, forks, closing, and connections that break."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from holdfast.claim import Busy, Claim, Grant
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.testing.contract.bench import ACROSS, SOON, Bench, Peer, contract
from holdfast.testing.harness import Knob

__all__: list[str] = []

REQUEST = 1.0


@contract.rule()
async def a_probe_finds_nothing_broken(bench: Bench) -> None:
    """``probe`` contacts the store and looks at what its guarantees rest on."""
    findings = await bench.peer().probe()
    assert findings
    assert all(finding.level in ("ok", "warning") for finding in findings), findings
    assert all(finding.subject and finding.detail for finding in findings)


@contract.rule()
async def many_use_a_few_connections(bench: Bench) -> None:
    """A hundred requests at once through one backend are all answered."""
    peer = bench.peer()
    claims = [bench.claim(f"name {number}") for number in range(100)]
    grants = await asyncio.gather(*(peer.take(claim) for claim in claims))
    assert all(await asyncio.gather(*(peer.release(grant) for grant in grants)))


@contract.rule(between_processes=True)
async def a_backend_works_after_forget(bench: Bench) -> None:
    """A forked child drops what it inherited and sends nothing; its parent's holds stay."""
    parent, child = bench.peer(), bench.peer()
    kept = await parent.take(bench.claim())
    used = await child.take(bench.claim("used"))
    child.backend.forget()
    assert isinstance(await child.attempt(bench.claim(), join=False), Busy)
    assert (await child.take(bench.claim("new"))).token > 0
    assert await parent.release(kept) is True
    assert [h.token for h in (await parent.look("used")).holders] == [used.token]


@contract.rule()
async def closing_twice_is_fine(bench: Bench) -> None:
    """A backend may be closed before its first request, and twice."""
    unused, used = bench.peer(), bench.peer()
    await unused.close()
    await used.take(bench.claim())
    await used.close()
    await used.close()


@contract.rule(knobs=[Knob.DROP_REPLY])
async def a_lost_reply_is_told_and_undone(bench: Bench) -> None:
    """An attempt whose reply is lost is unknown; asking again gives one grant, abandoning none."""
    peer, other = bench.peer(proxied=True, request=REQUEST), bench.peer()
    await peer.release(await peer.take(bench.claim("warm")))
    claim = bench.claim()
    bench.harness.drop_next_reply()
    await _unknown_or_granted(peer, claim)
    grant = await _again(peer, claim)
    assert [holder.token for holder in (await other.look("name")).holders] == [grant.token]
    await peer.abandon(claim)
    assert (await other.look("name")).holders == ()


@contract.rule(knobs=[Knob.CUT])
async def cut_connections_are_replaced(bench: Bench) -> None:
    """After every connection was reset, holds are still there and requests work again."""
    peer, other = bench.peer(proxied=True, request=REQUEST), bench.peer()
    grant = await peer.take(bench.claim())
    bench.harness.cut()
    await _again(peer, bench.claim("other"))
    info = await other.look("name")
    if info.holders:  # a hold that ends with its connection is rightly gone
        assert await peer.release(grant) is True


@contract.rule(knobs=[Knob.CUT])
async def a_waiter_outlives_a_cut(bench: Bench) -> None:
    """A waiter whose connections were reset still gets the name when it is freed."""
    holder, waiter = bench.peer(), bench.peer(proxied=True, request=REQUEST)
    grant = await holder.take(bench.claim())
    getting = asyncio.create_task(_stubborn(waiter, bench.claim()))
    await asyncio.wait([getting], timeout=0.3)
    bench.harness.cut()
    await asyncio.wait([getting], timeout=0.3)
    assert await holder.release(grant)
    assert (await asyncio.wait_for(getting, SOON + REQUEST)).token > grant.token


@contract.rule(knobs=[Knob.STALL])
async def a_stalled_store_is_unavailable(bench: Bench) -> None:
    """A store that does not answer is reported within the request's time, without a secret."""
    peer = bench.peer(proxied=True, request=REQUEST)
    await peer.release(await peer.take(bench.claim("warm")))
    claim = bench.claim()
    bench.harness.stall()
    try:
        began = now()
        error = await _unavailable(peer, claim)
        assert now() - began < REQUEST + SOON
        assert claim.owner not in str(error)
    finally:
        bench.harness.unstall()
    await _again(peer, bench.claim("after"))


@contract.rule(knobs=[Knob.STALL])
async def an_undoing_is_given_up_when_it_must_be(bench: Bench) -> None:
    """The renewer has holds to look after: a store that hangs gets no more of its time."""
    peer = bench.peer(proxied=True, request=10 * SOON)
    claim = bench.claim()
    await peer.take(claim)
    bench.harness.stall()
    try:
        began = now()
        with suppress(BackendUnavailable):  # where a hold ends with its connection it is gone
            await peer.abandon(claim, until=now() + REQUEST)
        assert now() - began < REQUEST + SOON
    finally:
        bench.harness.unstall()
    await _undone(peer, claim)
    await _again(peer, bench.claim())


async def _undone(peer: Peer, claim: Claim) -> None:
    """Undoes until the store has done so."""
    deadline = now() + SOON
    while True:
        try:
            return await peer.abandon(claim, until=now() + SOON)
        except BackendUnavailable:
            assert now() < deadline, "the store was not reached again"
            await asyncio.sleep(0.05)


@contract.rule(knobs=[Knob.KILL])
async def a_restarted_server_goes_on(bench: Bench) -> None:
    """After the server died and came back, requests work and tokens still grow."""
    before, peer = bench.peer(), bench.peer(request=REQUEST)
    first = await before.take(bench.claim())
    assert await before.release(first)
    bench.harness.kill()
    await _unavailable(peer, bench.claim())
    bench.harness.restart()
    claim = bench.claim()
    grant = await asyncio.wait_for(_stubborn(peer, claim), bench.harness.outage_recovery + SOON)
    assert grant.token > first.token


async def _unavailable(peer: Peer, claim: Claim) -> BackendUnavailable:
    try:
        answer = await peer.attempt(claim, join=False)
    except BackendUnavailable as error:
        return error
    raise AssertionError(f"a store that can't be reached answered {answer}")


async def _unknown_or_granted(peer: Peer, claim: Claim) -> None:
    with suppress(BackendUnavailable):
        await peer.take(claim)


async def _again(peer: Peer, claim: Claim) -> Grant:
    """Attempts until the store is reached again."""
    deadline = now() + SOON
    while True:
        try:
            return await peer.take(claim)
        except BackendUnavailable:
            assert now() < deadline, "the store was not reached again"
            await asyncio.sleep(0.05)


async def _stubborn(peer: Peer, claim: Claim) -> Grant:
    """Attempts and waits through outages, as the core does, with its re-check."""
    while True:
        try:
            answer = await peer.attempt(claim)
            if isinstance(answer, Grant):
                return answer
            await peer.wait(claim, answer, now() + min(answer.retry_seconds or ACROSS, 5.0))
        except BackendUnavailable:
            await asyncio.sleep(0.05)
