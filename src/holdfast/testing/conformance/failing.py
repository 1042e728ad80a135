"""The store goes away during a wait, a hold, an acquire or a release."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from holdfast.errors import BackendUnavailable, LockLost
from holdfast.io.clock import now
from holdfast.testing.conformance.bench import (
    SOON,
    Bench,
    Stalls,
    conformance,
    eventually,
    in_some_try,
    raises,
    stopped_in_time,
    within,
)
from holdfast.testing.harness import Knob
from holdfast.testing.rules import Flavour

if TYPE_CHECKING:
    from holdfast.locks_async import AsyncLocks

__all__: list[str] = []


async def _token(client: AsyncLocks, timeout: float | None) -> int:
    async with client.lock("name", timeout=timeout) as lease:
        return lease.token


@conformance.rule(knobs=[Knob.KILL])
async def a_waiter_outlives_a_restart(bench: Bench) -> None:
    """A waiter is served after the server died and came back, and tokens still grow."""
    ours, theirs = bench.client(), bench.client()
    async with ours.lock("name") as before:
        token = before.token
    lease = await ours.lock("name", ttl=bench.kept_ttl).acquire()
    assert lease is not None
    waiting = asyncio.create_task(_token(theirs, 6 * SOON))
    await asyncio.wait([waiting], timeout=0.3)
    bench.harness.kill()
    await asyncio.wait([waiting], timeout=0.5)
    assert not waiting.done() or not lease.held
    bench.harness.restart()
    await lease.release()
    allowed = bench.kept_ttl + bench.recovery + bench.harness.outage_recovery + 2 * SOON
    assert await within(allowed, waiting) > token


@conformance.rule(knobs=[Knob.PAUSE])
async def an_outage_ends_a_hold_in_time(bench: Bench) -> None:
    """A holder that can't renew knows by its own clock that the hold is over."""
    client = bench.client()
    reasons: list[str] = []
    lease = await client.lock("name", ttl=bench.ttl).acquire()
    assert lease is not None
    lease.on_lost(reasons.append)
    bench.harness.pause()
    try:
        began = moment = now()
        while lease.held:
            assert moment < began + bench.ttl, "still held after its ttl"
            await asyncio.sleep(0.01)
            moment = now()  # before the look: a delay in between does not count as holding
        assert lease.lost
        assert lease.reason
        with raises(LockLost):
            lease.check()
        await eventually(lambda: _any(reasons), SOON, "on_lost was not called")
    finally:
        bench.harness.resume()
    assert await lease.release() is False
    await _works_again(bench, client)


async def _any(reasons: list[str]) -> bool:
    return bool(reasons)


async def _works_again(bench: Bench, client: AsyncLocks) -> None:
    allowed = bench.recovery + bench.harness.outage_recovery + 2 * SOON
    taken = await client.lock("name", timeout=allowed).acquire()
    assert taken is not None
    assert await taken.release() is True


@conformance.rule(knobs=[Knob.PAUSE], flavours=[Flavour.ASYNCIO], slow=True)
async def an_outage_stops_the_async_block(bench: Bench) -> None:
    """The block is cancelled while time is left, and tells why."""
    client = bench.client()
    lock = client.lock("name", ttl=bench.kept_ttl, timeout=6 * SOON)

    async def stopped() -> bool:
        try:
            return await stopped_in_time(lock, bench.kept_ttl, bench.harness.pause)
        finally:
            bench.harness.resume()

    await in_some_try(stopped, "the block was stopped too late")
    await _works_again(bench, client)


@conformance.rule(knobs=[Knob.STALL], flavours=[Flavour.ASYNCIO])
async def a_stopped_block_is_left_in_time(bench: Bench) -> None:
    """``LockLost`` is raised by the end of what was certain, whatever becomes of the release."""
    client = bench.client(proxied=True)
    ends = 0.0
    try:
        with Stalls() as stalls, raises(LockLost):
            async with client.lock("name", ttl=bench.kept_ttl) as lease:
                bench.harness.stall()
                ends = now() + lease.remaining
                await asyncio.sleep(bench.kept_ttl + SOON)
        late = now() - ends
        assert late < 1.0 + stalls.seconds, f"the block was left {late:.2f} s too late"
    finally:
        bench.harness.unstall()


@conformance.rule(knobs=[Knob.STALL])
async def a_short_outage_is_survived(bench: Bench) -> None:
    """A hold outlives an outage that is shorter than its certain time."""
    client, other = bench.client(proxied=True), bench.client()
    async with client.lock("name", ttl=max(4 * bench.ttl, 6)) as lease:
        bench.harness.stall()
        await asyncio.sleep(bench.ttl / 2)
        bench.harness.unstall()
        await lease.extend()
        assert lease.held
        assert await other.lock("name").acquire(blocking=False) is None


@conformance.rule(knobs=[Knob.STALL], slow=True)
async def a_dead_store_is_told(bench: Bench) -> None:
    """An unreachable store is reported within the timeout, or without one after ``patience``; the
    error says which store and what was tried."""
    client, patient = bench.client(proxied=True), bench.client(proxied=True, patience=1)
    for one in (client, patient):
        async with one.lock("warm"):
            pass

    async def in_time(acquiring: Awaitable[object]) -> None:
        began = now()
        with raises(BackendUnavailable) as raised:
            await acquiring
        assert now() - began < 1 + 2 * SOON
        assert issubclass(type(raised.error), ConnectionError)
        assert "name" in str(raised.error)

    bench.harness.stall()
    try:
        await asyncio.gather(
            in_time(client.lock("name", timeout=1).acquire()),
            in_time(patient.lock("name").acquire()),
        )
    finally:
        bench.harness.unstall()
    await bench.freed(bench.client(), "name", 2 * SOON)


@conformance.rule(knobs=[Knob.STALL], slow=True)
async def a_failed_release_is_not_raised(bench: Bench) -> None:
    """Leaving a block while the store is away raises nothing but the body's own exception."""
    client, ttl = bench.client(proxied=True), max(bench.ttl, 3)
    inside = asyncio.Barrier(3)

    async def fail() -> None:
        with raises(ZeroDivisionError):
            async with client.lock("one", ttl=ttl):
                await inside.wait()
                await inside.wait()
                raise ZeroDivisionError

    async def go_well() -> None:
        async with client.lock("other", ttl=ttl):
            await inside.wait()
            await inside.wait()

    leaving = [asyncio.create_task(fail()), asyncio.create_task(go_well())]
    await inside.wait()
    bench.harness.stall()
    try:
        await inside.wait()
        await within(3 * SOON, asyncio.gather(*leaving))
    finally:
        bench.harness.unstall()
    for name in ("one", "other"):
        await bench.freed(bench.client(), name, bench.recovery + ttl + 2 * SOON)


@conformance.rule(knobs=[Knob.DROP_REPLY])
async def a_lost_reply_costs_nothing(bench: Bench) -> None:
    """An acquire whose reply is lost is tried again and gives one hold; so is a release."""
    client, other = bench.client(proxied=True), bench.client()
    async with client.lock("warm"):
        pass
    bench.harness.drop_next_reply()
    lease = await client.lock("name", timeout=2 * SOON).acquire()
    assert lease is not None
    assert lease.held
    (holder,) = (await other.inspect("name")).holders
    assert holder.token == lease.token
    bench.harness.drop_next_reply()
    await lease.release()
    await bench.freed(other, "name", 2 * SOON)


@conformance.rule(knobs=[Knob.CUT])
async def cut_connections_lose_no_lease(bench: Bench) -> None:
    """Holds and waiters outlive the reset of every connection, as the store promises."""
    ours, theirs = bench.client(proxied=True), bench.client(proxied=True)
    lease = await ours.lock("name").acquire()
    assert lease is not None
    waiting = asyncio.create_task(_token(theirs, 3 * SOON))
    await asyncio.wait([waiting], timeout=0.2)
    bench.harness.cut()
    await asyncio.wait([waiting], timeout=0.2)
    still = bool((await bench.client().inspect("name")).holders)
    released = await lease.release()
    # None is the honest answer where the request was cut off, too: it is undone then.
    assert released is not False or not still or lease.lost
    assert await within(2 * SOON, waiting) > lease.token
