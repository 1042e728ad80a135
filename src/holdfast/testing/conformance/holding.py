"""Entering a block means held, or an exception. What a lease says, and who may end it."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.claim import Fence, Mode
from holdfast.core.contract import Guarantee
from holdfast.errors import AlreadyHeld, LockLost, LockTimeout, NotHeld
from holdfast.testing.conformance.bench import SOON, Bench, calmly, conformance, raises
from holdfast.testing.rules import Flavour

__all__: list[str] = []


@conformance.rule()
async def a_block_is_held(bench: Bench) -> None:
    """Inside the block nobody else gets the name; after it the name is free."""
    ours, theirs = bench.client(), bench.client()
    async with ours.lock("name") as lease:
        assert lease.held
        assert await theirs.lock("name").acquire(blocking=False) is None
        assert await theirs.lock("name").locked()
    assert (lease.held, lease.lost) == (False, False)
    assert not await theirs.lock("name").locked()
    async with theirs.lock("name"):
        pass


@conformance.rule()
async def a_lease_says_what_is_held(bench: Bench) -> None:
    """Name, mode, token, fence, ttl and note; the certain time is less than the ttl."""
    client = bench.client(epoch=3)
    async with client.lock("name", ttl=20, note="for the test") as lease:
        assert (lease.name, lease.mode, lease.slots) == ("name", Mode.EXCLUSIVE, ())
        assert (lease.ttl, lease.note) == (20, "for the test")
        assert lease.fence == Fence("name", Mode.EXCLUSIVE, (), 3, lease.token)
        assert Fence.parse(str(lease.fence)) == lease.fence
        assert 0 < lease.remaining < 20
        assert (lease.held, lease.lost, lease.doubtful) == (True, False, False)
        assert bool(lease)
        lease.check()
        lease.check(at_least=1)
        with raises(LockLost):
            lease.check(at_least=21)


@conformance.rule()
async def an_exception_leaves_the_block_released(bench: Bench) -> None:
    """The body's own exception comes out, and the name is free."""
    client = bench.client()
    with raises(KeyError) as raised:
        async with client.lock("name"):
            raise KeyError("mine")
    assert raised.error.args == ("mine",)
    assert await bench.is_free(client, "name")


@conformance.rule()
async def acquire_gives_a_lease_or_none(bench: Bench) -> None:
    """As with ``threading.Lock``: a true lease, or nothing, within the time."""
    ours, theirs = bench.client(), bench.client()
    lease = await ours.lock("name").acquire()
    assert lease
    assert await theirs.lock("name").acquire(blocking=False) is None
    assert await theirs.lock("name").acquire(timeout=0) is None
    assert await calmly(lambda s: theirs.lock("name").acquire(timeout=s)) is None
    assert await calmly(lambda s: theirs.lock("name", timeout=s).acquire()) is None
    assert await lease.release()
    theirs_now = await theirs.lock("name").acquire(timeout=0)
    assert theirs_now
    assert await theirs_now.release()


@conformance.rule()
async def a_release_answers_once(bench: Bench) -> None:
    """The first release says yes, every other one no, and none raises."""
    client = bench.client()
    lease = await client.lock("name").acquire()
    assert lease is not None
    assert await lease.release() is True
    assert await lease.release() is False
    assert not lease.held
    with raises(LockLost):
        lease.check()


@conformance.rule()
async def a_block_may_be_released_early(bench: Bench) -> None:
    """Who releases inside the block leaves it without an error, and touches nobody's hold."""
    ours, theirs = bench.client(), bench.client()
    async with ours.lock("name") as lease:
        assert await lease.release() is True
        taken = await theirs.lock("name").acquire(timeout=SOON)
        assert taken is not None
    assert taken.held
    assert await taken.release() is True


@conformance.rule()
async def a_lock_releases_only_what_came_through_it(bench: Bench) -> None:
    """``release()`` is of the newest lease that this task took through this object."""
    client = bench.client()
    lock = client.lock("name")
    with raises(NotHeld):
        await lock.release()
    lease = await lock.acquire()
    assert lease is not None
    with raises(NotHeld):
        await client.lock("name").release()

    async def another_task() -> None:
        with raises(NotHeld):
            await lock.release()

    await asyncio.create_task(another_task())
    assert lease.held
    await lock.release()
    assert (lease.held, lease.lost) == (False, False)
    with raises(NotHeld):
        await lock.release()


@conformance.rule()
async def a_shared_lock_object_keeps_leases_apart(bench: Bench) -> None:
    """One ``Lock`` used by many tasks: each releases its own hold and nobody else's."""
    lock = bench.client().lock("name")
    holding: list[int] = []

    async def use(number: int) -> int:
        async with lock as lease:
            holding.append(number)
            await asyncio.sleep(0.001)
            assert lease.held
            assert holding == [number]
            holding.remove(number)
            return lease.token

    tokens = await asyncio.gather(*(use(number) for number in range(16)))
    assert len(set(tokens)) == 16


@conformance.rule()
async def tokens_grow_from_hold_to_hold(bench: Bench) -> None:
    """Whichever client takes the name next has the higher fence."""
    clients = [bench.client(), bench.client()]
    fences = []
    for turn in range(6):
        async with clients[turn % 2].lock("name") as lease:
            fences.append(lease.fence)
    assert fences == sorted(fences)
    assert len({fence.token for fence in fences}) == 6


@conformance.rule()
async def taking_it_again_is_told(bench: Bench) -> None:
    """A task that would wait for itself gets ``AlreadyHeld`` instead of hanging."""
    client = bench.client()
    async with client.lock("name") as lease:
        with raises(AlreadyHeld):
            await client.lock("name").acquire()
        with raises(AlreadyHeld):
            async with client.lock("name", timeout=5):
                pass
        assert await client.lock("name").acquire(blocking=False) is None
        assert lease.held
    async with client.lock("name"):
        pass


@conformance.rule()
async def re_entry_keeps_the_hold(bench: Bench) -> None:
    """A re-entrant lock gives a child handle with the same token; the last one ends the hold."""
    ours, theirs = bench.client(), bench.client()
    lock = ours.lock("name", reentrant=True)
    async with lock as outer:
        async with lock as inner:
            assert inner.token == outer.token
        assert outer.held
        assert not inner.held
        third = await ours.lock("name", reentrant=True).acquire()
        assert third is not None
    assert third.held
    assert third.token == outer.token
    assert await theirs.lock("name").acquire(blocking=False) is None
    assert await third.release() is True
    assert await bench.is_free(theirs, "name")


@conformance.rule()
async def re_entry_is_not_for_others(bench: Bench) -> None:
    """Another task of the same client waits, also a task that the holder started."""
    client = bench.client()

    async def child() -> bool:
        lock = client.lock("name", reentrant=True)
        return await calmly(lambda s: lock.acquire(timeout=s)) is None

    async with client.lock("name", reentrant=True):
        assert await asyncio.create_task(child())


@conformance.rule(Guarantee.SHARED)
async def reading_then_writing_is_told(bench: Bench) -> None:
    """Who reads a name and wants to write it would wait for itself."""
    client = bench.client()
    both = client.rwlock("name", reentrant=True)
    async with both.read():
        with raises(AlreadyHeld):
            await both.write().acquire()
        async with both.read():
            pass
    async with both.write():
        with raises(AlreadyHeld):
            await both.read().acquire()


@conformance.rule()
async def extending_renews_now(bench: Bench) -> None:
    """``extend`` gives a full ttl of certain time, or another ttl from here on."""
    client = bench.client()
    lease = await client.lock("name", ttl=20, renew=False).acquire()
    assert lease is not None
    token = lease.token
    await lease.extend()
    assert 0 < lease.remaining < 20
    await lease.extend(ttl=40)
    assert 20 < lease.remaining < 40
    assert (lease.ttl, lease.token) == (40, token)
    (holder,) = (await client.inspect("name")).holders
    assert holder.remaining > 20
    await lease.release()
    with raises(LockLost):
        await lease.extend()


@conformance.rule()
async def extending_may_change_the_ttl_again_and_again(bench: Bench) -> None:
    """Other ttls in turn, longer and shorter ones, keep the hold and its token."""
    ours, theirs = bench.client(), bench.client()
    lease = await ours.lock("name", ttl=20).acquire()
    assert lease is not None
    token = lease.token
    for ttl in (30, 40, 25, 20, 40):
        await lease.extend(ttl=ttl)
        assert (lease.held, lease.ttl, lease.token) == (True, ttl, token)
        assert await theirs.lock("name").acquire(blocking=False) is None
        assert [holder.token for holder in (await theirs.inspect("name")).holders] == [token]
    assert await lease.release() is True
    assert await bench.is_free(theirs, "name")


@conformance.rule()
async def a_decorated_function_runs_under_the_lock(bench: Bench) -> None:
    """``@locks.lock("report:{day}")``: fields come from the call's arguments."""
    ours, theirs = bench.client(), bench.client()

    def plain(day: str, *, region: str = "eu") -> str:
        """What it does."""
        return f"{day} {region}"

    async def coroutine(day: str, *, region: str = "eu") -> str:
        """What it does."""
        return plain(day, region=region)

    function: Any = plain if bench.flavour is Flavour.BLOCKING else coroutine
    lock = ours.lock("report:{day}:{region}", timeout=0)
    report = lock(function)
    assert await report("mon") == "mon eu"
    assert await bench.is_free(theirs, "report:mon:eu")
    async with theirs.lock("report:mon:us"):
        assert await report(day="mon") == "mon eu"
        with raises(LockTimeout):
            await report("mon", region="us")
    with raises(ValueError):
        ours.lock("report:{hour}")(function)
