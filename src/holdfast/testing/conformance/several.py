"""Several names at once: sorted, all or none, lost together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.errors import InvalidName, LockLost
from holdfast.io.clock import now
from holdfast.testing.conformance.bench import (
    SOON,
    Bench,
    calmly,
    conformance,
    eventually,
    once_in_time,
    raises,
    times_out,
    within,
)

if TYPE_CHECKING:
    from holdfast.locks_async import AsyncLocks

__all__: list[str] = []


@conformance.rule()
async def all_are_held(bench: Bench) -> None:
    """Every name is held, once, in sorted order, each with its fence."""
    ours, theirs = bench.client(), bench.client()
    async with ours.multi(["b", "a", "c", "a"]) as lease:
        assert list(lease.leases) == ["a", "b", "c"]
        assert {name: fence.name for name, fence in lease.fences.items()} == {
            "a": "a",
            "b": "b",
            "c": "c",
        }
        assert lease.held
        lease.check()
        assert not hasattr(lease, "token")
        for name in "abc":
            assert await theirs.lock(name).acquire(blocking=False) is None
    assert await theirs.list() == []
    for names in ([], [""], "abc"):
        with raises((ValueError, TypeError, InvalidName)):
            ours.multi(names)


@conformance.rule()
async def all_or_none(bench: Bench) -> None:
    """If one name can't be had in time, none is kept."""
    ours, theirs = bench.client(), bench.client()
    async with theirs.lock("b"):
        assert await ours.multi(["a", "b", "c"]).acquire(blocking=False) is None
        assert await calmly(lambda s: ours.multi(["a", "b", "c"]).acquire(timeout=s)) is None
        await calmly(lambda s: times_out(ours.multi(["a", "b", "c"], timeout=s)))
        for name in "ac":
            assert await bench.is_free(theirs, name)
    lease = await ours.multi(["a", "b", "c"]).acquire(timeout=SOON)
    assert lease is not None
    assert await lease.release() is True
    assert await lease.release() is False


@conformance.rule()
async def opposite_orders_never_lock_up(bench: Bench) -> None:
    """Two who name the same names in opposite orders both get their turns."""
    clients = [bench.client(), bench.client()]
    orders = [["a", "b", "c"], ["c", "b", "a"]]

    async def use(number: int) -> None:
        for _ in range(5):
            async with clients[number].multi(orders[number], timeout=SOON):
                await asyncio.sleep(0)

    await within(2 * SOON, asyncio.gather(use(0), use(1)))


@conformance.rule(sleeps=True)
async def what_is_held_is_renewed_meanwhile(bench: Bench) -> None:
    """While the last name is waited for, the first ones are kept."""
    await once_in_time(lambda: _kept_meanwhile(bench, bench.client(), bench.client()))


async def _kept_meanwhile(bench: Bench, ours: AsyncLocks, theirs: AsyncLocks) -> bool:
    last = await theirs.lock("b", timeout=SOON).acquire()
    assert last is not None
    multi = ours.multi(["a", "b"], ttl=bench.kept_ttl, timeout=3 * SOON)
    waiting = asyncio.create_task(multi.acquire())
    ends = now() + bench.kept_ttl * 1.3
    await bench.taken(theirs, "a")
    kept = True
    while kept and now() < ends:
        kept = len((await theirs.inspect("a")).holders) == 1
        await asyncio.sleep(bench.kept_ttl / 10)
    await last.release()
    try:
        lease = await within(3 * SOON, waiting)
    except LockLost:
        return False
    assert lease is not None
    return await lease.release() is True and kept


@conformance.rule(sleeps=True)
async def losing_one_loses_all(bench: Bench) -> None:
    """When one of the names is broken, all are lost, and the block says so."""
    ours, theirs = bench.client(), bench.client()
    reasons: list[str] = []
    with raises(LockLost):
        async with ours.multi(["a", "b"], ttl=2 * bench.kept_ttl) as lease:
            lease.on_lost(reasons.append)
            token = lease.leases["b"].token
            assert await theirs.break_lock("b", reason="to see") == token

            async def lost() -> bool:
                return lease.lost

            try:
                await eventually(lost, 2 * bench.kept_ttl + SOON, "the loss was not reported")
            finally:  # the async block is stopped by the loss
                assert not lease.held

    async def heard() -> bool:
        return bool(reasons)

    await eventually(heard, SOON, "nobody was called back")
    await asyncio.sleep(0.05)
    assert len(reasons) == 1
    await bench.freed(theirs, "a")
