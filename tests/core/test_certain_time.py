"""Certain time: late answers, old grants and long waits do not make it longer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest

import holdfast
from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.acquire import acquire
from holdfast.core.contract import Renewal, Waiting
from holdfast.core.engine import Engine
from holdfast.core.hold import AcquireOptions, Hold, State
from holdfast.core.renewer import Renewer
from holdfast.errors import LockLost
from holdfast.stores.memory import Ledger, MemoryStore
from holdfast.testing.simulator import Node, SimRuntime, World

TTL = 30.0
SECONDS = 15.0
"""How long a direct grant lasts."""
SOON = 10.0


def _claim() -> Claim:
    return Claim("name", Mode.EXCLUSIVE, 1, 0, TTL, "owner", "[]")


class Handle:
    _released = False


class LateStore:
    """Renews a hold, and answers after its certain time is over."""

    def __init__(self, runtime: SimRuntime) -> None:
        self._runtime = runtime
        self.answered = 0

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        await self._runtime.sleep(TTL)
        self.answered += 1
        return Renewal()

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None: ...


def test_a_late_answer_to_a_renewal_does_not_revive_the_hold() -> None:
    world = World(1)
    node = Node(world, "node", drift=0.0, skew=0.0)
    runtime = SimRuntime(node)
    store: Any = LateStore(runtime)
    renewer = Renewer(runtime, store, "sim://")
    hold = Hold(Grant(_claim(), 1), runtime.now(), True, None)
    handle = Handle()
    hold.handles.append(ref(handle))
    ends = hold.ends
    renewer.add(hold)
    node.spawn(renewer.run(), "renewer")
    world.run(2 * TTL)
    world.end()
    assert store.answered == 1
    assert hold.ends == ends
    assert hold.state is State.LOST


class WakingStore(MemoryStore):
    """Answers ``Busy`` first, then wakes the waiter with a direct grant."""

    def __init__(self, runtime: SimRuntime, after: float) -> None:
        super().__init__(Ledger(runtime.now, runtime.wall), "sim://")
        self._runtime, self._after = runtime, after
        self.attempts = 0

    def backend(self, runtime: object) -> Any:
        return self

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        self.attempts += 1
        return Busy(0) if self.attempts == 1 else Grant(claim, 7)

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        await self._runtime.sleep(self._after)
        return Grant(claim, 7, seconds=SECONDS)


@pytest.mark.parametrize(
    ("after", "renew", "attempts"),
    [(0.4 * SECONDS, True, 1), (0.6 * SECONDS, True, 2), (0.1 * SECONDS, False, 2)],
    ids=["young", "old", "never renewed"],
)
def test_a_direct_grant_is_used_while_it_is_young(after: float, renew: bool, attempts: int) -> None:
    """If much of its time may be over, the claim attempts again."""
    world = World(1)
    node = Node(world, "node", drift=0.0, skew=0.0)
    runtime = SimRuntime(node)
    store = WakingStore(runtime, after)
    renewer = Renewer(runtime, store.backend(runtime), "sim://")
    engine = Engine(store, runtime, renewer, patience=30, epoch=0)
    task = node.spawn(acquire(engine, _claim(), AcquireOptions(None, renew=renew, explain=False)))
    world.run(after + 1)
    hold = task.result
    assert isinstance(hold, Hold)
    assert store.attempts == attempts
    assert hold.ends - node.now() > SECONDS / 3
    world.end()


def test_several_leases_are_verified_after_the_last_wait() -> None:
    """The first may have expired during the wait for the last."""
    with holdfast.connect("memory://multi") as locks, holdfast.connect("memory://multi") as others:
        other = others.lock("b", ttl=1.5, renew=False).acquire()
        assert other is not None
        with pytest.raises(LockLost):
            locks.multi(["a", "b"], ttl=0.5, renew=False, timeout=SOON).acquire()
        assert not locks.lock("a").locked()
        assert not locks.lock("b").locked()
        other.release()


def test_several_async_leases_are_verified_after_the_last_wait() -> None:
    async def use() -> None:
        async with holdfast.connect_async("memory://async multi") as locks:
            other = await locks.lock("b", ttl=1.5, renew=False).acquire()
            assert other is not None
            multi = locks.multi(["a", "b"], ttl=0.5, renew=False, timeout=SOON)
            waiting = asyncio.create_task(multi.acquire())
            with pytest.raises(LockLost):
                await waiting
            assert not await locks.lock("b").locked()
            await other.release()

    asyncio.run(use())
