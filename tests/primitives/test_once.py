"""A job runs once per key: its outcome is recorded, a crash is taken over, a late outcome
refused."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from holdfast import JobFailed, LockLost, LockTimeout, ResultNotKept
from holdfast.testing import Flavour
from holdfast.testing.conformance.bench import calmly
from primitives.conftest import Bench


def test_runs_once_and_all_get_the_outcome(bench: Bench) -> None:
    runs: list[int] = []

    def bill(number: int) -> dict[str, int]:
        runs.append(number)
        return {"billed": number}

    async def body() -> None:
        first, second = bench.client(), bench.client()
        ours = await first.once("invoice:7").run(bill, 7)
        theirs = await second.once("invoice:7").run(bill, 7)
        assert runs == [7]
        assert (ours.ran, theirs.ran) == (True, False)
        assert ours.status == theirs.status == "done"
        assert ours.value == theirs.value == theirs.result() == {"billed": 7}
        assert ours.token == theirs.token
        assert (ours.attempt, ours.took_over) == (1, None)
        assert 0 <= theirs.age_seconds < 20
        await first.once("invoice:8").run(bill, 8)
        assert runs == [7, 8]

    bench.run(body)


def test_many_at_once_share_one_run(bench: Bench) -> None:
    runs: list[int] = []

    def work() -> int:
        runs.append(1)
        return len(runs)

    async def body() -> None:
        clients = [bench.client() for _ in range(3)]
        calls = [clients[n % 3].once("k").run(work) for n in range(12)]
        outcomes = await asyncio.gather(*calls)
        assert len(runs) == 1
        assert [outcome.value for outcome in outcomes] == [1] * 12
        assert sum(outcome.ran for outcome in outcomes) == 1

    bench.run(body)


def test_a_forgotten_job_runs_again(bench: Bench) -> None:
    async def body() -> None:
        first, second = bench.client(), bench.client()
        assert await first.once("k").outcome() is None
        assert await first.once("k").forget() is False
        ours = await first.once("k").run(lambda: "first")
        seen = await second.once("k").outcome()
        assert seen is not None
        assert (seen.value, seen.token, seen.ran) == ("first", ours.token, False)
        assert await second.once("k").forget() is True
        assert await second.once("k").outcome() is None
        assert await second.once("k").forget() is False
        again = await first.once("k").run(lambda: "again")
        assert (again.ran, again.value, again.attempt) == (True, "again", 1)
        assert again.took_over is None

    bench.run(body)


def test_only_its_own_record_is_forgotten_by_token(bench: Bench) -> None:
    """A run that was replaced does not remove the record of its successor."""

    async def body() -> None:
        client = bench.client()
        old = await client.once("k").run(lambda: "old")
        assert await client.once("k").forget(token=old.token) is True
        new = await client.once("k").run(lambda: "new")
        assert await client.once("k").forget(token=old.token) is False
        kept = await client.once("k").outcome()
        assert kept is not None
        assert (kept.value, kept.token) == ("new", new.token)

    bench.run(body)


def test_forgetting_waits_for_a_run_that_is_under_way(bench: Bench) -> None:
    running, go_on = threading.Event(), threading.Event()

    def work() -> str:
        running.set()
        assert go_on.wait(20)
        return "value"

    async def body() -> None:
        first, second = bench.client(), bench.client()
        run = asyncio.create_task(first.once("k").run(in_a_thread(bench, work)))
        assert await asyncio.to_thread(running.wait, 20)
        with pytest.raises(LockTimeout):
            await second.once("k", timeout=0).forget()
        go_on.set()
        await run
        assert await second.once("k").forget() is True

    bench.run(body)


def test_others_skip_by_choice(bench: Bench) -> None:
    running, go_on = threading.Event(), threading.Event()

    def work() -> str:
        running.set()
        assert go_on.wait(20)
        return "value"

    async def body() -> None:
        first, second = bench.client(), bench.client()
        task = asyncio.create_task(first.once("k").run(in_a_thread(bench, work)))
        await asyncio.to_thread(running.wait, 20)
        skipped = await second.once("k", wait=False).run(unreachable)
        assert (skipped.status, skipped.ran, skipped.value) == ("skipped", False, None)
        assert skipped.result() is None
        assert skipped.holder is not None
        with pytest.raises(LockTimeout, match="once/k"):
            await calmly(lambda s: second.once("k", timeout=s).run(unreachable))
        go_on.set()
        assert (await task).ran
        assert (await second.once("k", wait=False).run(unreachable)).value == "value"

    bench.run(body)


def test_an_error_is_retried(bench: Bench) -> None:
    def fail() -> None:
        raise ValueError("no such invoice")

    async def body() -> None:
        client = bench.client()
        for _ in range(2):
            with pytest.raises(ValueError, match="no such invoice"):
                await client.once("k").run(fail)
        outcome = await client.once("k").run(lambda: "at last")
        assert (outcome.value, outcome.attempt, outcome.took_over) == ("at last", 3, None)

    bench.run(body)


def test_an_error_is_recorded(bench: Bench) -> None:
    def fail() -> None:
        raise ValueError("no such invoice")

    async def body() -> None:
        client = bench.client()
        with pytest.raises(ValueError, match="no such invoice"):
            await client.once("k", errors="record").run(fail)
        outcome = await client.once("k").run(unreachable)
        assert (outcome.status, outcome.error) == ("failed", "ValueError: no such invoice")
        with pytest.raises(JobFailed, match="no such invoice") as caught:
            outcome.result()
        assert caught.value.error == "ValueError: no such invoice"

    bench.run(body)


def test_a_late_outcome_is_refused(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The first run loses its hold half-way; the second takes over, with a higher token."""
    running, go_on = threading.Event(), threading.Event()
    tokens: list[int] = []

    def slow(lease: Any) -> str:
        tokens.append(lease.token)
        running.set()
        assert go_on.wait(20)
        return "stale"

    async def body() -> None:
        first, second = bench.client(), bench.client()
        task = asyncio.create_task(first.once("k").run(in_a_thread(bench, slow)))
        await asyncio.to_thread(running.wait, 20)
        assert await second.break_lock("once/k", reason="a test") == tokens[0]
        with caplog.at_level(logging.WARNING, "holdfast"):
            outcome = await second.once("k").run(lambda: "fresh")
        assert outcome.took_over == tokens[0]
        assert outcome.token is not None
        assert outcome.token > tokens[0]
        assert outcome.attempt == 2
        assert "did not finish" in caplog.text
        go_on.set()
        with pytest.raises(LockLost) as caught:
            await task
        if bench.flavour is Flavour.BLOCKING or caught.value.result is not None:
            assert (
                caught.value.result == "stale"
            )  # a task is cancelled, if the loss is reported first
        recorded = await first.once("k").run(unreachable)
        assert (recorded.value, recorded.took_over) == ("fresh", tokens[0])

    bench.run(body)


def test_the_outcome_is_kept_as_long_as_asked(bench: Bench) -> None:
    async def body() -> None:
        client = bench.client()
        keep = 1.0  # stores with leases count whole seconds
        await client.once("longer", keep=3600).run(lambda: 1)
        first = again = await client.once("k", keep=keep).run(lambda: 1)
        while again.value == 1:
            await asyncio.sleep(0.05)
            again = await client.once("k", keep=keep).run(lambda: 2)
        assert (again.ran, again.attempt) == (True, 1)
        assert (await client.once("longer").run(lambda: 2)).value == 1
        assert again.token is not None
        assert first.token is not None
        assert again.token > first.token

    bench.run(body)


def test_results_are_json_for_all_callers(bench: Bench) -> None:
    async def body() -> None:
        client = bench.client()
        value: Any = {"a": (1, 2.5, None, True), "ü": "\0 \ud800"}
        ours = await client.once("k").run(lambda: value)
        theirs = await client.once("k").run(unreachable)
        assert ours.value == theirs.value == {"a": [1, 2.5, None, True], "ü": "\0 \ud800"}
        for number, unkept in enumerate(({1, 2}, float("nan"), {1: 2}, [object()], "x" * 300_000)):
            key = f"unkept {number}"
            with pytest.raises(TypeError) as caught:
                await client.once(key).run(lambda unkept=unkept: unkept)
            assert isinstance(caught.value, ResultNotKept)
            assert caught.value.result is unkept
            done = await client.once(key).run(unreachable)  # it ran: it is not run again
            assert done.status == "done"
            with pytest.raises(ResultNotKept):
                done.result()

    bench.run(body)


def test_its_own_timeout_is_not_taken_for_ours(bench: Bench) -> None:
    def fail() -> None:
        raise LockTimeout("another lock")

    async def body() -> None:
        with pytest.raises(LockTimeout, match="another lock"):
            await bench.client().once("k", wait=False).run(fail)

    bench.run(body)


def test_a_run_may_extend_its_lease(bench: Bench) -> None:
    """Stores with sessions may move the hold to another session: the outcome is still recorded."""

    async def body() -> None:
        async def longer_async(lease: Any) -> str:
            await lease.extend(25)
            return "done"

        def longer(lease: Any) -> str:
            lease.extend(25)
            return "done"

        work: Any = longer_async if bench.flavour is Flavour.ASYNCIO else longer
        assert (await bench.client().once("k").run(work)).value == "done"
        assert (await bench.client().once("k").run(unreachable)).value == "done"

    bench.run(body)


def test_as_a_decorator(bench: Bench) -> None:
    runs: list[tuple[int, int]] = []

    async def body() -> None:
        def work(number: int, lease: Any = None) -> int:
            runs.append((number, lease.token))
            return number * 2

        async def work_async(number: int, lease: Any = None) -> int:
            return work(number, lease)

        function: Any = work_async if bench.flavour is Flavour.ASYNCIO else work
        bill = bench.client().once("invoice:{number}")(function)
        assert await bill(4) == 8
        assert await bill(number=4) == 8
        assert await bill(5) == 10
        assert [number for number, _ in runs] == [4, 5]

    bench.run(body)


def unreachable() -> None:
    raise AssertionError("it was run again")


def in_a_thread(bench: Bench, work: Any) -> Any:
    """The work as the client needs it: a job that waits must not block the loop."""
    if bench.flavour is Flavour.BLOCKING:
        return work
    if "lease" in work.__code__.co_varnames:

        async def call_with(lease: Any) -> Any:
            return await asyncio.to_thread(work, lease)

        return call_with

    async def call() -> Any:
        return await asyncio.to_thread(work)

    return call
