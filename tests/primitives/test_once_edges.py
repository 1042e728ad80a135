"""Requests of jobs, arguments that they refuse, and a run whose process is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import (
    BackendUnavailable,
    Guarantee,
    Incompatible,
    InvalidName,
    LockLost,
    Locks,
    Unsupported,
)
from holdfast.core.drive import run_now
from holdfast.testing import Harness
from holdfast.testing.guarantees import guarantees_of

RUNNER = """
import sys, time
import holdfast
url, namespace, ttl, path = sys.argv[1:]

def work(lease):
    with open(path, "a") as file:
        file.write(f"{lease.token}\\n")
    time.sleep(600)

holdfast.connect(url, namespace=namespace, ttl=float(ttl)).once("nightly").run(work)
"""


class Counting:
    """A backend that counts requests by method, and fails some of them."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.asked: list[str] = []
        self.failing: dict[str, int] = {}

    def __getattr__(self, word: str) -> Any:
        method = getattr(self._inner, word)

        async def ask(*args: Any, **options: Any) -> Any:
            self.asked.append(word)
            if self.failing.get(word, 0) > 0:
                self.failing[word] -= 1
                raise BackendUnavailable("the store is away")
            return await method(*args, **options)

        return method if word in ("nudge", "forget") else ask


@pytest.fixture
def locks(request: pytest.FixtureRequest) -> Any:
    with holdfast.connect(f"memory://{request.function.__name__}") as client:
        yield client


def counted(locks: Locks) -> Counting:
    counting: Any = Counting(locks._engine.backend)
    locks._engine.backend = counting
    return counting  # type: ignore[no-any-return]


def test_a_done_job_costs_one_request(locks: Locks) -> None:
    counting = counted(locks)
    job = locks.once("k")
    assert job.run(lambda: 1).ran
    assert counting.asked == ["recall", "attempt", "recall", "record", "record", "release"]
    counting.asked.clear()
    assert job.run(lambda: 2).value == 1
    assert counting.asked == ["recall"]


@pytest.mark.parametrize("word", ["recall", "record"])
def test_an_outage_shorter_than_the_ttl_loses_no_run(locks: Locks, word: str) -> None:
    counting = counted(locks)
    runs: list[int] = []
    counting.failing[word] = 3
    assert locks.once(word).run(lambda: runs.append(1)).ran
    assert runs == [1]


def test_an_outage_longer_than_the_ttl_is_raised(locks: Locks) -> None:
    counting = counted(locks)

    def fail_from_here() -> str:
        counting.failing["record"] = 1000
        return "value"

    with pytest.raises(BackendUnavailable):
        locks.once("k", ttl=2, renew=False).run(fail_from_here)
    counting.failing.clear()
    assert locks.once("k").run(lambda: "again").took_over is not None


def test_a_store_without_records_says_so(locks: Locks) -> None:
    locks._engine.store.guarantees = locks.guarantees - {Guarantee.RECORDS}
    with pytest.raises(Unsupported, match=r"once\(\).*RECORDS"):
        locks.once("k")
    with pytest.raises(Unsupported, match=r"every\(\).*RECORDS"):
        locks.every(60, "k")


def test_redlock_keeps_no_records() -> None:
    """Raised when the job is made, before anything is contacted."""
    with holdfast.connect("redlock://h1,h2,h3") as locks:
        with pytest.raises(Unsupported, match=r"once\(\)"):
            locks.once("k")
        with pytest.raises(Unsupported, match=r"every\(\)"):
            locks.every(60, "k")


def test_bad_input_is_refused_when_it_is_made(locks: Locks) -> None:
    locks.once("k" * 507)
    with pytest.raises(InvalidName, match="at most 507 bytes, not 508"):
        locks.once("k" * 508)
    with pytest.raises(InvalidName, match="a job's key can't be empty"):
        locks.once("")
    with pytest.raises(TypeError, match="a job's key is text, not int"):
        locks.once(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="errors is 'retry' or 'record'"):
        locks.once("k", errors="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep"):
        locks.once("k", keep=0)
    with pytest.raises(TypeError, match="re-entered"):
        locks.once("k", reentrant=True)
    with pytest.raises(ValueError, match="no argument 'number'"):
        locks.once("k:{number}")(lambda: 1)
    with pytest.raises(ValueError, match="interval"):
        locks.every(0.001, "k")
    with pytest.raises(ValueError, match="missed"):
        locks.every(1, "k", missed="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grace"):
        locks.every(1, "k", grace=1)


def test_each_client_takes_its_own_kind_of_function(locks: Locks) -> None:
    async def asynchronous() -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="connect_async"):
        locks.once("k").run(asynchronous)

    async def body() -> None:
        async with holdfast.connect_async("memory://kinds") as client:
            with pytest.raises(TypeError, match=r"connect\(\)"):
                client.once("k")(lambda: 1)
            assert (await client.once("k").run(lambda: 1)).value == 1

    asyncio.run(body())


def test_a_newer_record_is_refused(locks: Locks) -> None:
    for text in ('{"format": 2, "status": "done"}', "no JSON", "[]"):
        with locks.lock("once/k") as lease:
            work = locks._engine.backend.record(lease._hold.grant, text, 60)
            run_now(work)
        with pytest.raises(Incompatible, match="'k'"):
            locks.once("k").run(lambda: 1)


def test_a_task_is_cancelled_before_another_takes_over() -> None:
    async def body() -> None:
        async with holdfast.connect_async("memory://stopped") as client:
            with pytest.raises(LockLost):
                await client.once("k", ttl=2, renew=False).run(asyncio.sleep, 30)
            outcome = await client.once("k").run(lambda: "done")
            assert outcome.took_over is not None

    asyncio.run(body())


def test_a_killed_runner_is_taken_over(harness: Harness, tmp_path: Path) -> None:
    if Guarantee.RECORDS not in guarantees_of(harness):
        pytest.skip(f"{harness.name} has no RECORDS")
    if not harness.between_processes:
        pytest.skip(f"{harness.name} has no other processes")
    namespace, path = f"killed{time.time_ns()}", tmp_path / "tokens"
    words = [sys.executable, "-c", RUNNER, harness.url, namespace, str(harness.ttl), str(path)]
    with subprocess.Popen(words) as process:
        deadline = time.monotonic() + 30
        while not path.exists() or not path.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    token = int(path.read_text())
    with holdfast.connect(harness.url, namespace=namespace, timeout=60) as locks:
        outcome = locks.once("nightly").run(lambda: "done")
        assert outcome.ran
        assert outcome.took_over == token
        assert outcome.attempt == 2
        assert outcome.token is not None
        assert outcome.token > token
        assert locks.once("nightly").run(lambda: "again").value == "done"
