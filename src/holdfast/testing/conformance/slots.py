"""Semaphores through the clients."""

from __future__ import annotations

import asyncio

from holdfast.claim import Mode
from holdfast.core.contract import Guarantee
from holdfast.errors import LimitMismatch, LockLost
from holdfast.testing.conformance.bench import SOON, Bench, conformance, raises, within

__all__: list[str] = []

SLOTS, FIFO = Guarantee.SLOTS, Guarantee.FIFO


@conformance.rule(SLOTS)
async def as_many_as_the_limit(bench: Bench) -> None:
    """``limit`` leases fit, each with its slot and its fence; the next one waits."""
    ours, theirs = bench.client(), bench.client()
    leases = [await client.semaphore("name", 3).acquire() for client in (ours, theirs, ours)]
    held = [lease for lease in leases if lease is not None]
    assert sorted(lease.slots for lease in held) == [(0,), (1,), (2,)]
    assert {lease.mode for lease in held} == {Mode.SLOTS}
    assert held[0].fence.slots == held[0].slots
    assert await theirs.semaphore("name", 3).acquire(blocking=False) is None
    assert await theirs.semaphore("name", 3).locked()
    await held[1].release()
    again = await theirs.semaphore("name", 3).acquire(timeout=SOON)
    assert again is not None
    assert again.slots == held[1].slots
    assert again.token > held[1].token
    for lease in (held[0], held[2], again):
        assert await lease.release() is True


@conformance.rule(SLOTS)
async def permits_are_taken_together(bench: Bench) -> None:
    """Two permits are two slots, had and given back as one."""
    ours, theirs = bench.client(), bench.client()
    async with ours.semaphore("name", 3, permits=2) as lease:
        assert len(set(lease.slots)) == 2
        assert await theirs.semaphore("name", 3, permits=2).acquire(blocking=False) is None
        async with theirs.semaphore("name", 3) as single:
            assert not set(single.slots) & set(lease.slots)
    async with theirs.semaphore("name", 3, permits=3) as everything:
        assert everything.slots == (0, 1, 2)
    for limit, permits in ((0, 1), (-1, 1), (2, 3), (2, 0)):
        with raises(ValueError):
            ours.semaphore("name", limit, permits=permits)


@conformance.rule(SLOTS)
async def a_task_may_hold_several_slots(bench: Bench) -> None:
    """Slots are not one another's self-deadlock: a task may hold two of them."""
    client = bench.client()
    async with client.semaphore("name", 2) as one, client.semaphore("name", 2) as other:
        assert {one.slots, other.slots} == {(0,), (1,)}


@conformance.rule(SLOTS)
async def the_limit_binds_while_in_use(bench: Bench) -> None:
    """Another limit is an error while anybody holds; so is a lock of the same name."""
    ours, theirs = bench.client(), bench.client()
    async with ours.semaphore("name", 3):
        with raises(LimitMismatch):
            await theirs.semaphore("name", 4).acquire()
        with raises(LimitMismatch):
            await theirs.semaphore("name", 4).acquire(blocking=False)
        with raises(LimitMismatch):
            await theirs.lock("name").acquire()
    async with theirs.semaphore("name", 4):
        pass
    async with theirs.lock("name"):
        with raises(LimitMismatch):
            await ours.semaphore("name", 4).acquire()
    assert await bench.is_free(ours, "name")


@conformance.rule(SLOTS)
async def a_slot_outlives_changes_of_its_ttl(bench: Bench) -> None:
    """A slot that was waited for is the same slot with the same token for every client."""
    ours, theirs = bench.client(), bench.client()
    first = await ours.semaphore("name", 1, ttl=20).acquire()
    assert first is not None
    waiting = asyncio.create_task(theirs.semaphore("name", 1, ttl=20).acquire())
    await asyncio.wait([waiting], timeout=0.2)
    assert await first.release() is True
    lease = await within(SOON, waiting)
    assert lease.token > first.token
    for ttl in (30, 20, 40):
        await lease.extend(ttl=ttl)
        (holder,) = (await ours.inspect("name")).holders
        assert (holder.token, holder.slots) == (lease.token, lease.slots)
        assert await ours.semaphore("name", 1).acquire(blocking=False) is None
    assert await ours.break_lock("name", reason="a test") == lease.token
    with raises(LockLost):
        await lease.extend()
    again = await ours.semaphore("name", 1).acquire(timeout=SOON)
    assert again is not None
    assert again.token > lease.token
    assert await again.release() is True


@conformance.rule(SLOTS)
async def never_more_than_fit(bench: Bench) -> None:
    """Many tasks of several clients: no slot is held twice, nor with a token that is not higher
    than all it was held with before; everybody is served."""
    clients = [bench.client() for _ in range(3)]
    inside: set[int] = set()
    highest: dict[int, int] = {}
    most = 0

    async def use(number: int) -> None:
        nonlocal most
        permits = 1 + number % 2
        lock = clients[number % 3].semaphore("name", 3, permits=permits, timeout=SOON)
        for _ in range(4):
            async with lock as lease:
                assert not inside & set(lease.slots)
                inside.update(lease.slots)
                assert all(lease.token > highest.get(slot, 0) for slot in lease.slots)
                highest.update(dict.fromkeys(lease.slots, lease.token))
                most = max(most, len(inside))
                await asyncio.sleep(0.002)
                inside.difference_update(lease.slots)

    await within(3 * SOON, asyncio.gather(*(use(number) for number in range(9))))
    assert most <= 3
    assert most > 1
