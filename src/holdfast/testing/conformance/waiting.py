"""Timeouts, wake-ups and the order in which waiters are served."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from holdfast.core.contract import Guarantee
from holdfast.io.clock import now
from holdfast.testing.conformance.bench import (
    SOON,
    Bench,
    calmly,
    conformance,
    eventually,
    times_out,
    within,
)

if TYPE_CHECKING:
    from holdfast.locks_async import AsyncLocks

__all__: list[str] = []

FIFO = Guarantee.FIFO
LONG = 60.0


@conformance.rule()
async def a_timeout_names_the_holder(bench: Bench) -> None:
    """Who waited in vain learns who holds it: host, pid, note; it is a ``TimeoutError`` too."""
    ours, theirs = bench.client(), bench.client()
    async with ours.lock("name", note="the nightly run"):
        for timeout in (0, 0.05):
            error = await calmly(
                lambda seconds: times_out(theirs.lock("name", timeout=seconds)), timeout
            )
            assert issubclass(type(error), TimeoutError)
            assert error.name == "name"
            assert error.holder is not None
            assert (error.holder.pid, error.holder.note) == (os.getpid(), "the nightly run")
            assert "name" in str(error)
            assert "the nightly run" in str(error)
            assert str(os.getpid()) in str(error)


@conformance.rule()
async def a_timeout_is_kept_and_leaves_nothing(bench: Bench) -> None:
    """Who gave up is not in line any more, and the time was neither cut short nor stretched."""
    ours, theirs = bench.client(), bench.client()
    async with ours.lock("name"):
        assert 0.3 <= await calmly(lambda s: _wait_in_vain(theirs, s), 0.3) < SOON
        info = await ours.inspect("name")
        assert (len(info.holders), info.waiters) == (1, ())
    assert await bench.is_free(ours, "name")


async def _wait_in_vain(client: AsyncLocks, timeout: float) -> float:
    """How long that took."""
    began = now()
    assert await client.lock("name").acquire(timeout=timeout) is None
    return now() - began


@conformance.rule()
async def a_release_lets_the_waiter_in(bench: Bench) -> None:
    """A waiter of another client is woken by the release, not by a clock."""
    ours, theirs = bench.client(), bench.client()
    lease = await ours.lock("name").acquire()
    assert lease is not None
    waiting = asyncio.create_task(_token(theirs))
    await _waits(bench, ours, waiting)
    began = now()
    await lease.release()
    assert await within(SOON, waiting) > lease.token
    # The re-check behind a lost wake-up comes after 5 s; ten of these take less.
    for _ in range(10):
        async with ours.lock("name"):
            waiting = asyncio.create_task(_token(theirs))
            await _waits(bench, ours, waiting)
        await within(SOON, waiting)
    assert now() - began < 2 * SOON


async def _token(client: AsyncLocks) -> int:
    async with client.lock("name", timeout=LONG) as lease:
        return lease.token


async def _waits(bench: Bench, client: AsyncLocks, waiting: asyncio.Task[int]) -> None:
    if FIFO in bench.guarantees:
        await bench.in_line(client, "name", 1)
    else:
        await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done()


@conformance.rule(FIFO)
async def clients_are_served_in_order(bench: Bench) -> None:
    """First come, first served between the first waiters of several clients."""
    holder, clients = bench.client(), [bench.client() for _ in range(4)]
    served: list[int] = []

    async def wait(number: int) -> None:
        async with clients[number].lock("name", timeout=LONG):
            served.append(number)

    async with holder.lock("name"):
        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(wait(number)))
            await bench.in_line(holder, "name", number + 1)
    await within(SOON, asyncio.gather(*tasks))
    assert served == [0, 1, 2, 3]


@conformance.rule()
async def tasks_of_a_client_are_served_in_order(bench: Bench) -> None:
    """First come, first served in one client, and its waiters are one place in the store's line."""
    holder, client = bench.client(), bench.client()
    lock = client.lock("name", timeout=LONG)
    served: list[int] = []

    async def wait(number: int) -> None:
        async with lock:
            served.append(number)

    tasks = []
    async with holder.lock("name"):
        for number in range(12):
            tasks.append(asyncio.create_task(wait(number)))
            await _locally(client, number + 1)
        if FIFO in bench.guarantees:
            await bench.in_line(holder, "name", 1)
    await within(SOON, asyncio.gather(*tasks))
    assert served == list(range(12))


async def _locally(client: AsyncLocks, count: int) -> None:
    """Returns once so many wait in this client."""

    async def stand() -> bool:
        return _locally_now(client) == count

    await eventually(stand, SOON, f"{count} did not come to wait")


def _locally_now(client: AsyncLocks) -> int:
    return len(client._engine.local_queues.all())


@conformance.rule()
async def many_are_all_served(bench: Bench) -> None:
    """Two hundred holds by many tasks of three clients: one at a time, each with its token."""
    locks = [bench.client().lock("name", timeout=LONG) for _ in range(3)]
    inside: list[int] = []
    tokens: list[int] = []

    async def use(number: int) -> None:
        for _ in range(4):
            async with locks[number % 3] as lease:
                inside.append(number)
                await asyncio.sleep(0)
                assert inside == [number]
                tokens.append(lease.token)
                inside.clear()

    await within(LONG, asyncio.gather(*(use(number) for number in range(48))))
    assert len(tokens) == 192
    assert tokens == sorted(set(tokens))


@conformance.rule()
async def waiters_behind_one_that_gave_up_are_served(bench: Bench) -> None:
    """A first waiter that leaves takes nobody with it."""
    ours, theirs = bench.client(), bench.client()
    async with ours.lock("name"):
        first = await _impatient(theirs)
        while not _locally_now(theirs):  # a waiter that gave up early does not count
            first = await _impatient(theirs)
        second = asyncio.create_task(_token(theirs))
        await within(SOON, first)
        assert not second.done()
    await within(SOON, second)


async def _impatient(client: AsyncLocks) -> asyncio.Task[float]:
    """A task that waits for a moment; returned once it is in its client's queue, or has left it."""
    waiting = asyncio.create_task(calmly(lambda s: _wait_in_vain(client, s), 0.1))

    async def came() -> bool:
        return bool(_locally_now(client)) or waiting.done()

    await eventually(came, SOON, "it did not come to wait")
    return waiting


@conformance.rule()
async def a_local_queue_gives_others_their_turn(bench: Bench) -> None:
    """A client with many waiters does not keep the name from another client."""
    busy, other = bench.client(), bench.client()
    ended = asyncio.Event()
    rounds = 0

    async def hog() -> None:
        nonlocal rounds
        while not ended.is_set():
            async with busy.lock("name", timeout=LONG):
                rounds += 1

    hogs = [asyncio.create_task(hog()) for _ in range(8)]
    try:
        for _ in range(5):
            lease = await other.lock("name").acquire(timeout=SOON)
            assert lease is not None, f"left out for {rounds} rounds of the other client"
            await lease.release()
    finally:
        ended.set()
        await within(SOON, asyncio.gather(*hogs))
