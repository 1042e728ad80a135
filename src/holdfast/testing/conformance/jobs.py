"""Jobs that run once per key or once per interval, with their outcome recorded."""

from __future__ import annotations

import asyncio

from holdfast.core.contract import Guarantee
from holdfast.errors import JobFailed, Unsupported
from holdfast.io.clock import wall
from holdfast.testing.conformance.bench import SOON, Bench, conformance, raises, within

__all__: list[str] = []

RECORDS = Guarantee.RECORDS


@conformance.rule()
async def without_records_there_are_no_jobs(bench: Bench) -> None:
    """A store that can't keep a record says so when the job is made."""
    client = bench.client()
    if RECORDS in bench.guarantees:
        client.once("key")
        client.every(60, "name")
        return
    with raises(Unsupported):
        client.once("key")
    with raises(Unsupported):
        client.every(60, "name")


@conformance.rule(RECORDS)
async def a_job_runs_once_per_key(bench: Bench) -> None:
    """Many callers of several clients: one runs it, all get its value."""
    clients = [bench.client() for _ in range(3)]
    runs: list[str] = []

    def job(word: str) -> dict[str, str]:
        runs.append(word)
        return {"said": word}

    async def call(number: int) -> object:
        job_of_mine = clients[number % 3].once("key", timeout=2 * SOON)
        return await job_of_mine.run(job, f"by {number}")

    outcomes = await within(3 * SOON, asyncio.gather(*(call(n) for n in range(9))))
    assert len(runs) == 1
    assert [outcome.value for outcome in outcomes] == [{"said": runs[0]}] * 9
    assert sum(outcome.ran for outcome in outcomes) == 1
    assert {outcome.status for outcome in outcomes} == {"done"}
    other = await clients[0].once("another key").run(job, "again")
    assert other.ran


@conformance.rule(RECORDS)
async def a_job_that_failed_is_tried_again(bench: Bench) -> None:
    """Its own exception comes out; the next caller runs it again, unless it is recorded."""
    ours, theirs = bench.client(), bench.client()

    def fail() -> None:
        raise ZeroDivisionError

    with raises(ZeroDivisionError):
        await ours.once("key").run(fail)
    outcome = await theirs.once("key").run(lambda: "better")
    assert (outcome.ran, outcome.value, outcome.attempt) == (True, "better", 2)
    with raises(ZeroDivisionError):
        await ours.once("other", errors="record").run(fail)
    outcome = await theirs.once("other", errors="record").run(lambda: "not run")
    assert (outcome.ran, outcome.status) == (False, "failed")
    with raises(JobFailed):
        outcome.result()


@conformance.rule(RECORDS)
async def a_running_job_is_waited_for_or_skipped(bench: Bench) -> None:
    """Who finds it running waits for its outcome, or goes on without."""
    ours, theirs = bench.client(), bench.client()
    async with ours.lock("once/key"):
        skipped = await theirs.once("key", wait=False).run(lambda: "not run")
        assert (skipped.ran, skipped.status) == (False, "skipped")
        waiting = asyncio.create_task(theirs.once("key", timeout=2 * SOON).run(lambda: "run"))
        await asyncio.wait([waiting], timeout=0.1)
        assert not waiting.done()
    assert (await within(2 * SOON, waiting)).value == "run"


@conformance.rule(RECORDS)
async def an_interval_runs_once(bench: Bench) -> None:
    """Of all who come in one interval one runs the job; the others skip it."""
    clients = [bench.client(), bench.client()]
    runs: list[float] = []

    def job() -> None:
        runs.append(wall())

    interval = 3600.0
    if interval - wall() % interval < SOON:  # an hour that ends during this test is two
        interval = 1800.0 * 7
    for _ in range(2):
        for client in clients:
            outcome = await client.every(interval, "name").run(job)
            assert outcome.next_seconds is not None
    assert len(runs) == 1


@conformance.rule(RECORDS, between_processes=True, sleeps=True)
async def a_crashed_job_is_taken_over(bench: Bench) -> None:
    """A runner that is killed leaves its job to the next, which knows whom it follows."""
    client, process = bench.client(), bench.process(ttl=bench.ttl)
    process.send("run_forever", key="key")
    token = (await process.answer())["token"]
    process.kill()
    outcome = await client.once("key", timeout=bench.recovery + 2 * SOON).run(lambda: "done")
    assert (outcome.ran, outcome.took_over, outcome.attempt) == (True, token, 2)
    assert outcome.token is not None
    assert outcome.token > token
