"""Lease hand-over: one process ends its part in a hold, another one goes on with it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.claim import Mode
from holdfast.core.contract import Guarantee
from holdfast.errors import BackendUnavailable, HoldfastError, LockLost, Unsupported
from holdfast.io.clock import now
from holdfast.testing.conformance.bench import (
    SOON,
    Bench,
    Stalls,
    conformance,
    in_some_try,
    once_in_time,
    raises,
)
from holdfast.testing.guarantees import NEEDS_MAJORITY, hands_over, row_of
from holdfast.testing.harness import Knob
from holdfast.testing.processes import ProcessFailed
from holdfast.testing.rules import Flavour

if TYPE_CHECKING:
    from holdfast.lease import AsyncLease
    from holdfast.locks_async import AsyncLocks

__all__: list[str] = []

LONG = 30.0


async def _lease(client: AsyncLocks, ttl: float = LONG) -> AsyncLease:
    lease = await client.lock("name", ttl=ttl, timeout=SOON).acquire()
    assert lease is not None
    return lease


async def _handed_over(client: AsyncLocks, ttl: float) -> tuple[AsyncLease, str, float]:
    """A lease, its text, and when it was handed over. It is lost before that only if the machine
    stands still."""
    given: list[tuple[AsyncLease, str, float]] = []

    async def gives() -> bool:
        lease, began = await _lease(client, ttl), now()
        with suppress(LockLost):
            given.append((lease, await lease.hand_over(), began))
        return bool(given)

    await once_in_time(gives)
    return given[0]


@conformance.rule()
async def a_store_says_whether_it_can(bench: Bench) -> None:
    """A store that can't hand a lease over says ``Unsupported``, and the lease stays held."""
    ours, theirs = bench.client(), bench.client()
    lease = await _lease(ours)
    if hands_over(bench.harness):
        taken = await theirs.take_over(await lease.hand_over())
        assert (lease.held, taken.held) == (False, True)
        assert await taken.release() is True
        return
    with raises(Unsupported) as raised:
        await lease.hand_over()
    assert "hand" in str(raised.error)
    assert lease.held
    assert await lease.release() is True


@conformance.rule(hand_over=True)
async def a_lease_is_handed_over(bench: Bench) -> None:
    """The new lease is held with a higher token. The old one is over, and its block is left without
    an error, and without an end of what is another's."""
    ours, theirs = bench.client(epoch=1), bench.client(epoch=1)
    reasons: list[str] = []
    async with ours.lock("name", ttl=LONG, note="old") as lease:
        lease.on_lost(reasons.append)
        text = await lease.hand_over()
        assert (lease.held, lease.lost, lease.remaining) == (False, False, 0)
        taken = await theirs.take_over(text, note="new")
        assert taken.fence > lease.fence
        assert (taken.name, taken.mode, taken.ttl, taken.note) == ("name", lease.mode, LONG, "new")
        for refused in (lease.extend, lease.hand_over):
            with raises(LockLost):
                await refused()
        with raises(LockLost) as raised:
            lease.check()
        assert "handed over" in str(raised.error)
    assert await lease.release() is False
    assert taken.held
    assert await bench.client().lock("name").acquire(blocking=False) is None
    await taken.extend()
    assert await taken.release() is True
    assert await bench.is_free(ours, "name")
    assert reasons == []


@conformance.rule(hand_over=True)
async def a_text_works_once(bench: Bench) -> None:
    """Takers at the same time, in one client and in another: one of them gets the lease; or none,
    in a store where they can divide the servers among them."""
    ours, theirs, others = bench.client(), bench.client(), bench.client()
    text = await (await _lease(ours)).hand_over()
    takers = [client.take_over(text) for client in (theirs, theirs, others, ours)]
    found = await asyncio.gather(*map(asyncio.ensure_future, takers), return_exceptions=True)
    won = [each for each in found if not isinstance(each, BaseException)]
    assert [type(each) for each in found].count(LockLost) == len(takers) - len(won)
    assert len(won) == 1 or (not won and row_of(bench.harness) in NEEDS_MAJORITY)
    with raises(LockLost) as raised:
        await theirs.take_over(text)
    assert "name" in str(raised.error)
    assert text not in str(raised.error)
    for taken in won:
        assert taken.held
        assert await taken.release() is True


@conformance.rule(hand_over=True)
async def only_a_right_text_is_taken(bench: Bench) -> None:
    """A text that is damaged, or of another namespace, raises ``ValueError`` and is not shown."""
    ours, other = bench.client(), bench.client(namespace=f"{bench.namespace}2")
    lease = await _lease(ours)
    text = await lease.hand_over()
    assert text not in f"{lease!r} {ours!r}"
    for wrong in ("", "x", text[:-1], f"{text}A", text[1:], text * 40, f"{text[:-3]}\ud800AA"):
        with raises(ValueError) as raised:
            await ours.take_over(wrong)
        assert len(str(raised.error)) < 200
        assert text[20:40] not in str(raised.error)
    with raises(ValueError) as raised:
        await other.take_over(text)
    assert "namespace" in str(raised.error)
    assert await (await ours.take_over(text)).release() is True


@conformance.rule(hand_over=True)
async def a_re_entered_lease_is_not_handed_over(bench: Bench) -> None:
    """Only the last handle of a hold can be handed over."""
    client = bench.client()
    lock = client.lock("name", ttl=LONG, reentrant=True)
    async with lock as outer:
        async with lock as inner:
            with raises(HoldfastError):
                await inner.hand_over()
            assert inner.held
        taken = await client.take_over(await outer.hand_over())
    assert await taken.release() is True


@conformance.rule(hand_over=True)
async def a_lease_is_handed_on_and_on(bench: Bench) -> None:
    """From client to client, also back; each token is higher."""
    clients = bench.client(), bench.client()
    lease = await _lease(clients[0])
    tokens = [lease.token]
    for turn in range(1, 5):
        lease = await clients[turn % 2].take_over(await lease.hand_over())
        tokens.append(lease.token)
    assert tokens == sorted(set(tokens))
    assert await lease.release() is True
    assert await bench.is_free(clients[0], "name")


@conformance.rule(Guarantee.SHARED, Guarantee.SLOTS, hand_over=True)
async def every_mode_is_handed_over(bench: Bench) -> None:
    """Readers beside others, and slots, which stay the same ones."""
    ours, theirs = bench.client(), bench.client()
    for lock in (ours.rwlock("shared").read(), ours.semaphore("slots", 3, permits=2)):
        async with lock as lease:
            taken = await theirs.take_over(await lease.hand_over())
            assert (taken.mode, taken.slots) == (lease.mode, lease.slots)
            assert taken.token > lease.token
        if taken.mode is Mode.SHARED:
            assert await ours.rwlock("shared").write().acquire(blocking=False) is None
        else:
            assert await ours.semaphore("slots", 3, permits=2).acquire(blocking=False) is None
        assert await taken.release() is True


@conformance.rule(hand_over=True)
async def a_waiter_does_not_get_in_between(bench: Bench) -> None:
    """A waiter goes on waiting, and gets a higher token than the taker."""
    ours, theirs, waiting = bench.client(), bench.client(), bench.client()
    lease = await _lease(ours)
    getting = asyncio.create_task(waiting.lock("name", timeout=6 * SOON).acquire())
    await asyncio.wait([getting], timeout=0.3)
    text = await lease.hand_over()
    await asyncio.wait([getting], timeout=0.3)
    taken = await theirs.take_over(text)
    await asyncio.wait([getting], timeout=0.5)
    assert not getting.done(), "a waiter got the name beside the taker"
    assert await taken.release() is True
    got = await asyncio.wait_for(getting, 2 * SOON)
    assert got is not None
    assert got.token > taken.token
    await got.release()


@conformance.rule(hand_over=True)
async def all_waiters_go_on_behind_the_taker(bench: Bench) -> None:
    """Waiters of several clients, and several of giver and taker: each gets the name once, alone,
    and with a higher token than the one before."""
    ours, theirs = bench.client(), bench.client()
    lease, tokens = await _lease(ours), list[int]()

    async def use(client: AsyncLocks) -> None:
        async with client.lock("name", timeout=6 * SOON) as mine:
            tokens.append(mine.token)
            await asyncio.sleep(0.01)
            assert tokens[-1] == mine.token

    waiting = [asyncio.create_task(use(bench.client())) for _ in range(3)]
    waiting += [asyncio.create_task(use(client)) for client in (theirs, theirs, ours, ours)]
    await asyncio.wait(waiting, timeout=0.5)
    taken = await theirs.take_over(await lease.hand_over())
    await asyncio.wait(waiting, timeout=0.2)
    assert tokens == []
    tokens.append(taken.token)
    assert await taken.release() is True
    await asyncio.wait_for(asyncio.gather(*waiting), 3 * SOON)
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 8
    assert await bench.is_free(ours, "name")


@conformance.rule(hand_over=True)
async def a_break_ends_what_was_handed_over(bench: Bench) -> None:
    """``break_lock`` ends it; the taker learns that, and by whom."""
    ours, theirs = bench.client(), bench.client()
    lease = await _lease(ours)
    text = await lease.hand_over()
    assert await theirs.break_lock("name", reason="enough") == lease.token
    with raises(LockLost) as raised:
        await theirs.take_over(text)
    if Guarantee.RECORDS in bench.guarantees:
        assert "enough" in str(raised.error)
    next_one = await _lease(theirs)
    assert next_one.token > lease.token
    await next_one.release()


@conformance.rule(hand_over=True, sleeps=True)
async def what_is_not_taken_ends_with_its_ttl(bench: Bench) -> None:
    """The next waiter holds within ttl + 1 s, and what the store's sessions add, also if the old
    client goes on and renews another hold with the same ttl."""
    ours, theirs = bench.client(), bench.client()
    beside = await ours.lock("beside", ttl=bench.kept_ttl).acquire()
    assert beside is not None
    with Stalls() as stalls:
        lease, text, began = await _handed_over(ours, bench.kept_ttl)
        got = await theirs.lock("name").acquire(timeout=bench.recovery + 3 * SOON)
        took = now() - began
    assert got is not None
    assert got.token > lease.token
    assert took >= 0.9 * bench.kept_ttl, "it ended before its ttl"
    longest = bench.recovery + bench.kept_ttl - bench.ttl
    assert took - stalls.seconds < longest + 1.0, f"{took:.2f} s"
    with raises(LockLost):
        await ours.take_over(text)
    assert await got.release() is True
    await beside.release()


@conformance.rule(hand_over=True, sleeps=True)
async def what_is_taken_without_renewal_ends_with_its_ttl(bench: Bench) -> None:
    """Also if its new client renews another hold with the same ttl."""
    ours, theirs = bench.client(), bench.client()
    beside = await theirs.lock("beside", ttl=bench.kept_ttl).acquire()
    assert beside is not None
    _, text, _ = await _handed_over(ours, bench.kept_ttl)
    longest = bench.recovery + bench.kept_ttl - bench.ttl
    with Stalls() as stalls:
        began = now()
        with suppress(LockLost):  # a machine that stalls for a whole ttl
            taken = await theirs.take_over(text, renew=False)
            got = await ours.lock("name").acquire(timeout=bench.recovery + 3 * SOON)
            took = now() - began
            assert got is not None
            assert not taken.held
            assert got.token > taken.token
            assert took - stalls.seconds < longest + 1.0, f"{took:.2f} s"
            assert await got.release() is True
    await beside.release()


@conformance.rule(hand_over=True, sleeps=True)
async def it_lasts_one_ttl_until_taken(bench: Bench) -> None:
    """Counted from the hand-over, also if the last renewal was long ago."""
    ours, theirs = bench.client(), bench.client()

    async def lasts() -> bool:
        lock = ours.lock("name", ttl=bench.kept_ttl, renew=False, timeout=bench.recovery + SOON)
        lease = await lock.acquire()
        assert lease is not None
        try:
            await asyncio.sleep(0.6 * bench.kept_ttl)
            text = await lease.hand_over()
            await asyncio.sleep(0.6 * bench.kept_ttl)
            taken = await theirs.take_over(text)
        except LockLost:
            return False
        return bool(await taken.release())

    await in_some_try(lasts, "it ended before its ttl")


@conformance.rule(hand_over=True, sleeps=True)
async def a_taken_lease_is_renewed(bench: Bench) -> None:
    """By its new client, for as long as it is needed."""
    ours, theirs = bench.client(), bench.client()

    async def kept() -> bool:
        try:
            taken = await theirs.take_over(await (await _lease(ours, bench.kept_ttl)).hand_over())
            await asyncio.sleep(2.2 * bench.kept_ttl)
        except LockLost:
            return False
        held = taken.held
        return await taken.release() is True and held

    await once_in_time(kept)


@conformance.rule(hand_over=True, knobs=[Knob.DROP_REPLY])
async def a_lost_reply_to_a_take_over_costs_nothing(bench: Bench) -> None:
    """It is tried again, and gives one lease."""
    ours, theirs, other = bench.client(), bench.client(proxied=True), bench.client()
    async with theirs.lock("warm"):
        pass
    text = await (await _lease(ours)).hand_over()
    bench.harness.drop_next_reply()
    taken = await theirs.take_over(text, timeout=2 * SOON)
    assert [each.token for each in (await other.inspect("name")).holders] == [taken.token]
    with raises(LockLost):
        await other.take_over(text)
    assert await taken.release() is True
    await bench.freed(other, "name", 2 * SOON)


@conformance.rule(hand_over=True, knobs=[Knob.DROP_REPLY])
async def a_lost_reply_to_a_hand_over_is_told(bench: Bench) -> None:
    """The lease is handed over, or held as before, or lost and undone: nothing in between."""
    ours, other = bench.client(proxied=True), bench.client()
    lease = await _lease(ours)
    bench.harness.drop_next_reply()
    text = ""
    while not text and lease.held:  # of several servers each may lose a reply
        with suppress(BackendUnavailable):
            text = await lease.hand_over()
    if text:
        assert await (await other.take_over(text)).release() is True
    else:
        assert lease.lost
    await bench.freed(other, "name", LONG + 2 * SOON)


@conformance.rule(hand_over=True, between_processes=True)
async def another_process_goes_on(bench: Bench) -> None:
    """Both clients crosswise: a blocking one hands over to an asyncio one, and the reverse."""
    client = bench.client()
    for giver, taker in ((Flavour.BLOCKING, Flavour.ASYNCIO), (Flavour.ASYNCIO, Flavour.BLOCKING)):
        ours, theirs = bench.process(giver), bench.process(taker)
        token = await ours.ask("acquire", name="name", ttl=LONG)
        text = await ours.ask("hand_over", name="name")
        assert await theirs.ask("take_over", name="name", text=text) > token
        with raises(ProcessFailed) as raised:
            await ours.ask("take_over", name="name", text=text)
        assert raised.error.error == "LockLost"
        assert await ours.leave() == 0, ours.said()
        assert (await theirs.ask("state", name="name"))["held"]
        assert await client.lock("name").acquire(blocking=False) is None
        assert await theirs.ask("release", name="name") is True
    assert await bench.is_free(client, "name")


@conformance.rule(hand_over=True, between_processes=True)
async def a_giver_that_ends_takes_nothing_along(bench: Bench) -> None:
    """Its client is closed, and its session with it: the hold is there for its taker."""
    client, process = bench.client(), bench.process()
    token = await process.ask("acquire", name="name", ttl=LONG)
    text = await process.ask("hand_over", name="name")
    assert await process.leave() == 0, process.said()
    assert [holder.token for holder in (await client.inspect("name")).holders] == [token]
    taken = await client.take_over(text)
    assert taken.token > token
    assert await taken.release() is True


@conformance.rule(hand_over=True, between_processes=True)
async def a_taker_outlives_its_giver(bench: Bench) -> None:
    """A session that ends after the take-over ends nothing, either."""
    client, process = bench.client(), bench.process()
    await process.ask("acquire", name="name", ttl=LONG)
    taken = await client.take_over(await process.ask("hand_over", name="name"))
    assert await process.leave() == 0, process.said()
    await taken.extend()
    assert await bench.client().lock("name").acquire(blocking=False) is None
    assert await taken.release() is True


@conformance.rule(hand_over=True, between_processes=True, sleeps=True)
async def a_killed_giver_takes_nothing_along(bench: Bench) -> None:
    """kill -9 right after the hand-over: the hold is there for its ttl, and for its taker."""
    client = bench.client()

    async def survives() -> bool:
        process = bench.process()
        await process.ask("acquire", name="name", ttl=bench.kept_ttl, timeout=bench.recovery + SOON)
        text = await process.ask("hand_over", name="name")
        process.kill()
        await asyncio.sleep(0.5 * bench.kept_ttl)
        try:
            taken = await client.take_over(text)
            await asyncio.sleep(1.5 * bench.kept_ttl)
        except LockLost:
            return False
        held = taken.held
        return await taken.release() is True and held

    await once_in_time(survives)
