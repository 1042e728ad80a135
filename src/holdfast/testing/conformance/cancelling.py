"""A cancelled, interrupted or unanswered acquire leaves no hold and no queue entry."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.testing.conformance.bench import SOON, Bench, conformance, once_in_time, within
from holdfast.testing.harness import Knob
from holdfast.testing.rules import Flavour

if TYPE_CHECKING:
    from holdfast.locks_async import AsyncLocks

__all__: list[str] = []

ASYNC = [Flavour.ASYNCIO]


async def _try(client: AsyncLocks, seconds: float) -> bool:
    """An acquire that is cancelled after so long; whether it was there first."""
    acquiring = asyncio.create_task(client.lock("name").acquire())
    await asyncio.wait([acquiring], timeout=seconds)
    acquiring.cancel()
    with suppress(asyncio.CancelledError):
        lease = await acquiring
        assert lease is not None
        assert await lease.release() is True
        return True
    return False


@conformance.rule(flavours=ASYNC)
async def cancelled_on_an_idle_store(bench: Bench) -> None:
    """Cancelled at a random moment of a free acquire, again and again: nothing is left."""
    ours, theirs = bench.client(), bench.client()
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    for _ in range(200):
        await _try(ours, rng.random() * 0.003)
    await bench.freed(theirs, "name")
    taken = await theirs.lock("name").acquire(timeout=SOON)
    assert taken is not None, f"seed {seed}"
    await taken.release()


@conformance.rule(flavours=ASYNC)
async def cancelled_while_waiting(bench: Bench) -> None:
    """Waiters that are cancelled leave the line; those who stay are served."""
    ours, theirs = bench.client(), bench.client()
    async with ours.lock("name"):
        for _ in range(5):
            assert not await _try(theirs, 0.02)
        both = [asyncio.create_task(_try(theirs, 0.05)) for _ in range(4)]
        staying = asyncio.create_task(_hold(theirs))
        assert not any(await asyncio.gather(*both))
    await within(SOON, staying)
    await bench.freed(ours, "name")


async def _hold(client: AsyncLocks) -> None:
    async with client.lock("name"):
        pass


@conformance.rule(flavours=ASYNC)
async def cancelled_at_the_hand_over(bench: Bench) -> None:
    """Cancelled in the instant in which the name is handed over: the next one gets it."""
    ours, theirs, third = bench.client(), bench.client(), bench.client()
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    for _ in range(50):
        lease = await ours.lock("name").acquire(timeout=SOON)
        assert lease is not None, f"seed {seed}"
        trying = asyncio.create_task(_try(theirs, 0.005 + rng.random() * 0.004))
        behind = asyncio.create_task(_hold(third))
        await asyncio.sleep(0.004 + rng.random() * 0.004)
        await lease.release()
        await within(SOON, asyncio.gather(trying, behind))
    await bench.freed(ours, "name")


@conformance.rule(flavours=ASYNC)
async def wait_for_works(bench: Bench) -> None:
    """``asyncio.wait_for(lock.acquire(), …)`` gives a lease or leaves nothing behind."""
    ours, theirs = bench.client(), bench.client()
    lease = await asyncio.wait_for(ours.lock("name").acquire(), SOON)
    assert lease is not None
    for _ in range(3):
        try:
            await asyncio.wait_for(theirs.lock("name").acquire(), 0.03)
        except TimeoutError:
            continue
        raise AssertionError("two hold one name")
    assert await lease.release() is True
    await bench.freed(ours, "name")


@conformance.rule(flavours=ASYNC)
async def a_cancelled_block_is_released(bench: Bench) -> None:
    """Cancelling the task inside its block ends the hold, and the cancellation comes out."""
    ours, theirs = bench.client(), bench.client()
    entered = asyncio.Event()

    async def stay() -> None:
        async with ours.lock("name"):
            entered.set()
            await asyncio.sleep(60)

    staying = asyncio.create_task(stay())
    await entered.wait()
    staying.cancel()
    with suppress(asyncio.CancelledError):
        await staying
    assert staying.cancelled()
    await bench.freed(theirs, "name")


@conformance.rule(knobs=[Knob.HOLD_REPLIES], flavours=ASYNC)
async def cancelled_with_the_reply_held_back(bench: Bench) -> None:
    """The request arrived, its reply did not: what it did is undone all the same."""
    ours, theirs = bench.client(proxied=True), bench.client()
    async with ours.lock("warm"):
        pass
    for _ in range(3):
        bench.harness.hold_replies()
        try:
            assert not await _try(ours, 0.1)
        finally:
            bench.harness.let_replies()
        await bench.freed(theirs, "name", 2 * SOON)
    async with ours.lock("name"):
        pass


@conformance.rule(knobs=[Knob.HOLD_REPLIES])
async def a_grant_that_comes_too_late_is_none(bench: Bench) -> None:
    """A reply that took longer than the ttl grants nothing: the block is not entered."""
    ours, theirs = bench.client(proxied=True), bench.client()
    async with ours.lock("warm"):
        pass
    await once_in_time(lambda: _is_granted_again(bench, ours))
    await bench.freed(theirs, "name", 2 * SOON)


async def _is_granted_again(bench: Bench, ours: AsyncLocks) -> bool:
    """Acquires while the first reply comes too late; false if the lease that was given then has
    ended before it could be released."""
    bench.harness.hold_replies()
    lock = ours.lock("name", ttl=bench.kept_ttl)
    acquiring = asyncio.create_task(lock.acquire(timeout=3 * SOON))
    await asyncio.wait([acquiring], timeout=bench.kept_ttl * 1.1)
    assert not acquiring.done()
    bench.harness.let_replies()
    lease = await within(3 * SOON, acquiring)
    assert lease is not None
    held = lease.held
    return (await lease.release() is True) and held
