"""Renewal, and all the ways in which a hold ends before its block does."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.core.contract import Guarantee
from holdfast.core.hold import grace_seconds
from holdfast.errors import LockLost
from holdfast.io.clock import now
from holdfast.testing.conformance.bench import (
    SOON,
    Bench,
    Stalls,
    conformance,
    eventually,
    in_some_try,
    once_in_time,
    raises,
    renewer_hung,
    stopped_in_time,
    within,
)
from holdfast.testing.history import RecordedHold, faults
from holdfast.testing.rules import Flavour

if TYPE_CHECKING:
    from holdfast.locks_async import AsyncLocks
    from holdfast.primitives.lock_async import AsyncLock

__all__: list[str] = []


@conformance.rule(sleeps=True)
async def a_hold_outlives_its_ttl(bench: Bench) -> None:
    """The renewer renews what is held, many names at once, for as long as it is held."""
    ours, theirs = bench.client(), bench.client()
    await once_in_time(lambda: _outlives(bench.kept_ttl, ours, theirs))


async def _outlives(ttl: float, ours: AsyncLocks, theirs: AsyncLocks) -> bool:
    taken = [await ours.lock(f"name {n}", ttl=ttl, timeout=SOON).acquire() for n in range(5)]
    leases = [lease for lease in taken if lease is not None]
    assert len(leases) == 5
    certain = [0.0] * 5
    kept, ends = True, now() + 1.3 * ttl
    while kept and now() < ends:
        for number, lease in enumerate(leases):
            asked, left = now(), lease.remaining
            assert left > 0 or now() >= certain[number], lease.reason  # lost before its time
            certain[number] = asked + left
        rival = await theirs.lock("name 3").acquire(blocking=False)
        if rival is not None:
            assert not leases[3].held
            await rival.release()
        kept = rival is None and all(lease.held for lease in leases)
        await asyncio.sleep(ttl / 10)
    return all([await lease.release() for lease in leases]) and kept


@conformance.rule(sleeps=True)
async def without_renewal_it_ends_with_its_ttl(bench: Bench) -> None:
    """A hold that is not renewed is lost after its certain time, and others get it."""
    ours, theirs = bench.client(), bench.client()
    began = now()
    lease = await ours.lock("name", ttl=bench.ttl, renew=False).acquire()
    assert lease is not None
    taken = await theirs.lock("name").acquire(timeout=bench.recovery + SOON)
    assert taken is not None
    assert now() - began >= bench.ttl * 0.99 - 0.002
    assert lease.lost
    assert not lease.held
    assert lease.remaining == 0
    assert lease.reason
    assert taken.token > lease.token
    with raises(LockLost) as lost:
        lease.check()
    assert lost.error.name == "name"
    assert lost.error.reason
    assert await lease.release() is False
    assert taken.held
    assert await taken.release() is True


@conformance.rule(sleeps=True)
async def doubt_comes_before_loss(bench: Bench) -> None:
    """A hold that is not renewed is doubtful while it is still held, and then lost for good."""
    lock = bench.client().lock("name", ttl=bench.ttl, renew=False, timeout=bench.recovery + SOON)
    await in_some_try(lambda: _doubted(lock), "nobody could look while it was doubtful")


async def _doubted(lock: AsyncLock) -> bool:
    """Follows a hold to its end; whether it was seen both without doubt and in it."""
    lease = await lock.acquire()
    assert lease is not None
    grace = grace_seconds(lease.ttl)
    seen = set()
    while (before := lease.remaining) > 0:
        doubtful = lease.doubtful
        if lease.remaining > grace:
            assert not doubtful
            seen.add("held")
        elif before <= grace and lease.held:  # all the time while it was looked at
            assert doubtful
            seen.add("doubtful")
        await asyncio.sleep(lease.ttl / 50)
    assert lease.lost
    assert not lease.doubtful
    assert await lease.release() is False
    return len(seen) == 2


@conformance.rule(sleeps=True)
async def an_expired_lease_releases_nobody(bench: Bench) -> None:
    """One ``Lock`` for many tasks, whose leases run out under them: nobody ever ends the hold
    of another, and no two believe in theirs at the same time."""
    lock = bench.client().lock("name", ttl=bench.ttl, renew=False, timeout=6 * SOON)
    holds: list[RecordedHold] = []

    async def use(number: int) -> None:
        asked = now()
        lease = await lock.acquire()
        assert lease is not None
        held, ends = now(), now() + lease.remaining
        sleepy = number in (0, 9)
        await asyncio.sleep(lease.remaining + 0.01 if sleepy else 0.002)
        lost = lease.lost
        assert lost or not sleepy
        ends = min(ends, now())
        if number % 2:
            await lock.release()
        else:
            assert await lease.release() is False or not lost
        holds.append(RecordedHold(f"{number}", "name", lease.mode, asked, held, ends, lease.token))

    await within(6 * SOON, asyncio.gather(*(use(number) for number in range(16))))
    assert faults(holds) == []
    assert len(holds) == 16


@conformance.rule(sleeps=True)
async def a_clean_body_hears_of_the_loss(bench: Bench) -> None:
    """If the hold was lost and the body was clean, leaving the block raises ``LockLost``."""
    client = bench.client()
    with raises(LockLost):
        async with client.lock("name", ttl=bench.ttl, renew=False) as lease:
            while not lease.lost:  # a body that does not let itself be stopped
                await _unstoppable(bench.ttl / 20)
    async with client.lock("name"):
        pass


async def _unstoppable(seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()


@conformance.rule(sleeps=True)
async def the_body_s_own_exception_is_never_hidden(bench: Bench) -> None:
    """A body that fails after the hold was lost raises what it raised."""
    client = bench.client()
    with raises(ZeroDivisionError):
        async with client.lock("name", ttl=bench.ttl, renew=False) as lease:
            while not lease.lost:
                await _unstoppable(bench.ttl / 20)
            raise ZeroDivisionError


@conformance.rule(flavours=[Flavour.ASYNCIO], sleeps=True)
async def a_doubtful_block_is_cancelled(bench: Bench) -> None:
    """The async block is stopped before its lease runs out, and says why."""
    lock = bench.client().lock("name", ttl=bench.kept_ttl, renew=False, timeout=SOON)
    await in_some_try(
        lambda: stopped_in_time(lock, bench.kept_ttl), "the block was stopped too late"
    )
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@conformance.rule(sleeps=True)
async def a_loss_is_told_once(bench: Bench) -> None:
    """``on_lost`` calls back once with the reason; at once if it is lost already."""
    client = bench.client()
    lease = await client.lock("name", ttl=bench.ttl, renew=False).acquire()
    assert lease is not None
    reasons: list[str] = []
    lease.on_lost(reasons.append)
    assert reasons == []
    await eventually(lambda: _any(reasons), bench.recovery + SOON, "on_lost was not called")
    assert lease.lost
    late: list[str] = []
    lease.on_lost(late.append)
    await eventually(lambda: _any(late), SOON, "a late callback was not called")
    await lease.release()
    assert (len(reasons), len(late)) == (1, 1)
    assert reasons[0]


async def _any(reasons: Sequence[object]) -> bool:
    return bool(reasons)


LATE_SECONDS = 1.0
"""A loss is noticed within this time after the end of the certain time."""


@conformance.rule(sleeps=True)
async def a_renewal_that_hangs_delays_no_callback(bench: Bench) -> None:
    """``on_lost`` comes in time although the thread that renews stands still; what the store then
    still has of the hold is undone."""
    client, other = bench.client(), bench.client()
    await in_some_try(lambda: _noticed_in_time(bench, client), "the loss was noticed too late")
    await bench.freed(other, "name", bench.recovery + 2 * SOON)


async def _noticed_in_time(bench: Bench, client: AsyncLocks) -> bool:
    moments: list[float] = []
    with Stalls() as stalls, renewer_hung(client):
        lock = client.lock("name", ttl=bench.kept_ttl, timeout=bench.recovery + 2 * SOON)
        lease = await lock.acquire()
        assert lease is not None
        lease.on_lost(lambda reason: moments.append(now()))
        ends = now() + lease.remaining
        await eventually(lambda: _any(moments), bench.kept_ttl + SOON, "on_lost was not called")
        assert lease.lost
    late = moments[0] - ends
    assert late < LATE_SECONDS or stalls.seconds > LATE_SECONDS / 2, (
        f"noticed {late:.2f} s too late"
    )
    return late < LATE_SECONDS


@conformance.rule(flavours=[Flavour.ASYNCIO], sleeps=True)
async def a_renewal_that_hangs_delays_no_cancellation(bench: Bench) -> None:
    """The async block is stopped before its lease runs out although the thread that renews stands
    still."""
    client = bench.client()
    lock = client.lock("name", ttl=bench.kept_ttl, timeout=bench.recovery + 2 * SOON)

    async def stopped() -> bool:
        with renewer_hung(client):
            return await stopped_in_time(lock, bench.kept_ttl)

    await in_some_try(stopped, "the block was stopped too late")


@conformance.rule()
async def a_release_is_no_loss(bench: Bench) -> None:
    """Nobody is called back for a hold that was released."""
    client = bench.client()
    reasons: list[str] = []
    async with client.lock("name") as lease:
        lease.on_lost(reasons.append)
    async with client.lock("name") as again:
        again.on_lost(reasons.append)
    assert not lease.lost
    assert reasons == []


@conformance.rule(sleeps=True)
async def a_broken_hold_is_told(bench: Bench) -> None:
    """``break_lock`` ends another client's hold: it learns of the loss, the next token is
    higher."""
    ours, theirs = bench.client(), bench.client()
    reasons: list[str] = []
    lease = await ours.lock("name", ttl=2 * bench.kept_ttl).acquire()
    assert lease is not None
    lease.on_lost(reasons.append)
    assert await theirs.break_lock("name", reason="it hangs") == lease.token
    taken = await theirs.lock("name").acquire(timeout=SOON)
    assert taken is not None
    assert taken.token > lease.token
    await eventually(
        lambda: _any(reasons), 2 * bench.kept_ttl + SOON, "its holder did not learn it"
    )
    assert lease.lost
    assert await lease.release() is False
    assert taken.held
    assert await taken.release() is True


@conformance.rule(Guarantee.RECORDS)
async def a_broken_hold_is_told_why(bench: Bench) -> None:
    """The reason of ``break_lock`` reaches the holder, by a renewal as by a release."""
    ours, theirs = bench.client(), bench.client()
    for extends in (True, False):
        lease = await ours.lock("name").acquire()
        assert lease is not None
        assert await theirs.break_lock("name", reason="it hangs\n") == lease.token
        if extends:
            with raises(LockLost):
                await lease.extend()
        assert await lease.release() is False
        assert lease.reason.startswith("it was broken by ")
        assert lease.reason.endswith(r": it hangs\n")


@conformance.rule()
async def breaking_what_nobody_holds_is_nothing(bench: Bench) -> None:
    """``break_lock`` of a free name answers that there was nothing to end."""
    client = bench.client()
    assert not await client.break_lock("name", reason="to be sure")
    with raises(TypeError):
        await client.break_lock("name")  # type: ignore[call-arg] # a reason is required


@conformance.rule(sleeps=True)
async def max_hold_caps_the_total(bench: Bench) -> None:
    """A hold is kept alive no longer than ``max_hold``, whatever its renewals."""
    ours, theirs = bench.client(), bench.client()
    cap = bench.kept_ttl * 1.3
    began = now()
    lease = await ours.lock("name", ttl=bench.kept_ttl, max_hold=cap).acquire()
    assert lease is not None
    while not lease.lost:
        assert now() - began < cap + SOON
        await asyncio.sleep(0.01)
    assert now() - began > bench.kept_ttl
    taken = await theirs.lock("name").acquire(timeout=bench.recovery + SOON)
    assert taken is not None
    assert await lease.release() is False
    await taken.release()


@conformance.rule()
async def a_dropped_lease_is_released(bench: Bench) -> None:
    """A handle that nobody can reach any more is released, with a ``ResourceWarning``."""
    ours, theirs = bench.client(), bench.client()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await _take_and_drop(ours)

        async def freed_and_warned() -> bool:
            gc.collect()  # a lease and its lock refer to each other
            reasons = any("name" in str(one.message) for one in caught)
            return reasons and await bench.is_free(theirs, "name")

        await eventually(freed_and_warned, SOON, "a dropped lease was not released with a warning")
    assert {one.category for one in caught} == {ResourceWarning}


async def _take_and_drop(client: AsyncLocks) -> None:
    assert await client.lock("name").acquire() is not None


@conformance.rule()
async def a_block_ends_with_its_task(bench: Bench) -> None:
    """A block that its thread or task can no longer leave is not kept alive."""
    ours, theirs = bench.client(), bench.client()

    async def vanish() -> None:
        await ours.lock("name", ttl=bench.ttl).__aenter__()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        await asyncio.create_task(vanish())
        taken = await theirs.lock("name").acquire(timeout=bench.recovery + SOON)
        assert taken is not None
        await taken.release()


@conformance.rule()
async def one_renewer_serves_all(bench: Bench) -> None:
    """A hundred holds have one renewer thread."""
    async with bench.client().lock("first"):  # the process has its own threads from here on
        before = threading.active_count()
    client = bench.client()
    leases = [await client.lock(f"name {n}").acquire() for n in range(100)]
    # One renewer, the test's own worker, and at most one thread of the store's client.
    assert threading.active_count() - before <= 3
    for lease in leases:
        assert lease is not None
        await lease.release()
