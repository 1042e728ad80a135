"""A cache on ``once``: one caller makes a new value, the others get it, or the stale one at
once."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.testing import Flavour
from primitives.conftest import Bench

if TYPE_CHECKING:
    from holdfast import AsyncLocks, Outcome

KEEP, STALE_FOR = 0.01, 3600
SECONDS = 30.0


def cached(client: AsyncLocks) -> Any:
    """The job of a cache whose values are stale at once, and usable for an hour."""
    return client.once("price", keep=KEEP, stale_for=STALE_FOR)


class Refill:
    """A run that has begun and goes on until it is told to end."""

    def __init__(self, value: object) -> None:
        self.value = value
        self.lease: Any = None
        self.running, self.go_on = threading.Event(), threading.Event()

    def _work(self, lease: Any) -> object:
        self.lease = lease
        self.running.set()
        assert self.go_on.wait(SECONDS)
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    async def begin(self, bench: Bench, client: AsyncLocks) -> asyncio.Task[Outcome]:
        """Runs it as soon as the recorded value is stale."""

        async def in_a_thread(lease: Any) -> object:
            return await asyncio.to_thread(self._work, lease)

        work: Any = self._work if bench.flavour is Flavour.BLOCKING else in_a_thread
        ends = time.monotonic() + SECONDS
        while True:
            task = asyncio.create_task(cached(client).run(work))
            while not task.done():
                if await asyncio.to_thread(self.running.wait, 0.05):
                    return task
            assert not (await task).ran
            assert time.monotonic() < ends, "the value never became stale"


def test_a_stale_value_is_returned_at_once(bench: Bench) -> None:
    async def body() -> None:
        first, second = bench.client(), bench.client()
        made = await cached(first).run(lambda: "old")
        assert (made.value, made.stale, made.ran) == ("old", False, True)
        refill = Refill("new")
        task = await refill.begin(bench, first)
        for client in (first, second, second):
            found = await asyncio.wait_for(cached(client).run(unreachable), SECONDS)
            assert (found.value, found.stale, found.ran) == ("old", True, False)
            assert found.result() == "old"
            assert found.token == made.token
            assert found.age_seconds >= KEEP
        refill.go_on.set()
        done = await task
        assert (done.value, done.stale, done.ran, done.attempt) == ("new", False, True, 1)
        assert (await second.once("price").run(unreachable)).value == "new"

    bench.run(body)


def test_a_failed_refill_keeps_the_stale_value(bench: Bench) -> None:
    async def body() -> None:
        first, second = bench.client(), bench.client()
        await cached(first).run(lambda: "old")
        failing = Refill(ValueError("no prices"))
        task = await failing.begin(bench, first)
        failing.go_on.set()
        with pytest.raises(ValueError, match="no prices"):
            await task
        refill = Refill("new")
        task = await refill.begin(bench, first)
        assert (await cached(second).run(unreachable)).value == "old"
        refill.go_on.set()
        assert (await task).attempt == 2

    bench.run(body)


def test_a_broken_refill_is_taken_over(bench: Bench) -> None:
    """The hold of the refill ends, as after a crash: the next caller runs, the others get the stale
    value, and the late value is refused."""

    async def body() -> None:
        first, second, third = bench.client(), bench.client(), bench.client()
        await cached(first).run(lambda: "old")
        late = Refill("late")
        lost = await late.begin(bench, first)
        assert late.lease is not None
        await second.break_lock("once/price", reason="a test")
        refill = Refill("new")
        task = await refill.begin(bench, second)
        assert (await cached(third).run(unreachable)).value == "old"
        refill.go_on.set()
        assert (await task).took_over == late.lease.token
        late.go_on.set()
        with pytest.raises(holdfast.LockLost):
            await lost
        assert (await third.once("price").run(unreachable)).value == "new"

    bench.run(body)


def test_waiters_get_the_value_where_there_is_none_yet(bench: Bench) -> None:
    """Twelve callers miss: one runs, and none of the others runs or answers early."""
    runs: list[int] = []

    def work() -> str:
        runs.append(1)
        return "value"

    async def body() -> None:
        clients = [bench.client() for _ in range(3)]
        calls = [clients[n % 3].once("k", stale_for=STALE_FOR).run(work) for n in range(12)]
        outcomes = await asyncio.gather(*calls)
        assert [outcome.value for outcome in outcomes] == ["value"] * 12
        assert len(runs) == sum(outcome.ran for outcome in outcomes) == 1
        assert not any(outcome.stale for outcome in outcomes)

    bench.run(body)


def test_a_value_that_is_too_old_is_not_returned(bench: Bench) -> None:
    async def body() -> None:
        first, second = bench.client(), bench.client()
        await cached(first).run(lambda: "old")
        refill = Refill("new")
        task = await refill.begin(bench, first)
        shorter = second.once("price", keep=KEEP, stale_for=KEEP, wait=False)
        ends = time.monotonic() + SECONDS
        while (found := await shorter.run(unreachable)).stale:  # it is not too old yet
            assert time.monotonic() < ends, "the value never became too old"
        assert found.status == "skipped"
        refill.go_on.set()
        assert (await task).value == "new"

    bench.run(body)


@pytest.mark.parametrize("value", [False, 0, 0.0, "", [], {}, None])
def test_an_empty_value_is_a_value(value: object) -> None:
    with holdfast.connect("memory://empty-values") as locks:
        job = locks.once(f"empty {value!r}")
        ours, theirs = job.run(lambda: value), job.run(unreachable)
        assert (type(theirs.value), theirs.value) == (type(ours.value), value)


def test_stale_for_is_a_duration() -> None:
    with holdfast.connect("memory://") as locks, pytest.raises(ValueError, match="stale_for"):
        locks.once("k", stale_for=-1)


def unreachable() -> None:
    raise AssertionError("it was run again")
