"""APScheduler in several processes: without us each runs every job, with us one does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.executors.pool import ProcessPoolExecutor, ThreadPoolExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.interval import IntervalTrigger

import holdfast
import holdfast.integrations.apscheduler
from holdfast.integrations.apscheduler import Once
from integrations.processes import HERE, Fleet, Journal, eventually, fleet
from servers.redis import RedisServer
from servers.registry import Servers

PROGRAM = str(HERE / "apscheduler_program.py")
SECOND = timedelta(seconds=1)
DAY_SECONDS = 24 * 3600


def due_times(journal: Journal, job: str, *what: str) -> list[datetime]:
    """The fire times of the lines of a job."""
    return [
        datetime.fromisoformat(line.words[1])
        for line in journal.lines(*what)
        if line.words[0] == job
    ]


def assert_once_each(journal: Journal, job: str) -> None:
    """No fire time ran twice, and none between the first and the last was left out."""
    ran = sorted(due_times(journal, job, "ran"))
    assert [due for due, count in Counter(ran).items() if count > 1] == [], "not exclusive"
    gaps = [due for due, later in pairwise(ran) if later - due != SECOND]
    assert gaps == [], "a fire time was left out"


def wait_for_runs(processes: Fleet, job: str, count: int) -> None:
    """Returns after so many more runs of a job."""
    before = len(due_times(processes.journal, job, "ran"))
    eventually(
        f"{count} runs of {job}",
        lambda: len(due_times(processes.journal, job, "ran")) >= before + count,
    )


def start(processes: Fleet, number: int, kind: str, with_what: str, **environment: str) -> None:
    """Starts processes that all have the same schedule, and waits until each has come to one."""
    for _ in range(number):
        processes.start([PROGRAM, kind, with_what], **environment)
    started = {process.pid for process in processes.processes}
    eventually(
        "every process comes to a fire time",
        lambda: started <= {line.pid for line in processes.journal.lines("ran", "skipped")},
    )


def test_without_us_each_process_runs_every_job(servers: Servers, tmp_path: Path) -> None:
    with fleet(tmp_path, HOLDFAST_URL=servers.of(RedisServer).url, JOBS="cron") as processes:
        start(processes, 3, "threads", "nothing")
        wait_for_runs(processes, "cron", 6)
        counts = Counter(due_times(processes.journal, "cron", "ran"))
    assert max(counts.values()) == 3


@pytest.fixture
def store() -> Iterator[RedisServer]:
    with RedisServer(persist=True) as server:
        yield server


def test_each_fire_time_runs_once(store: RedisServer, tmp_path: Path) -> None:
    """With clocks that differ, a process that is paused, one that is killed, and the store
    restarted."""
    with fleet(tmp_path, HOLDFAST_URL=store.url, JOBS="cron interval") as processes:
        start(processes, 2, "threads", "once")
        start(processes, 1, "threads", "once", AHEAD="0.6")
        start(processes, 1, "threads", "once", AHEAD="-0.8")
        wait_for_runs(processes, "cron", 2)
        paused = processes.processes[1]
        stop_when_idle(paused, store.url)
        wait_for_runs(processes, "cron", 3)
        os.kill(paused.pid, signal.SIGCONT)  # finds three fire times that others have run
        stop_when_idle(processes.processes[2], store.url)
        processes.processes[2].kill()
        wait_for_runs(processes, "cron", 2)
        store.kill()
        store.restart()
        wait_for_runs(processes, "cron", 3)
        journal = processes.journal
        assert_once_each(journal, "cron")
        numbers = [due.timestamp() // 1 for due in due_times(journal, "interval", "ran")]
        assert max(Counter(numbers).values()) == 1, "not exclusive"
        assert len(numbers) >= len(due_times(journal, "cron", "ran")) - 2
        assert len({line.pid for line in journal.lines("ran")}) > 1


def stop_when_idle(process: subprocess.Popen[bytes], url: str) -> None:
    """Pauses a process between two runs: it holds nothing that would have to expire."""

    def idle() -> bool:
        os.kill(process.pid, signal.SIGSTOP)
        holders = [holder.pid for info in locks.list() for holder in info.holders]
        if process.pid in holders:
            os.kill(process.pid, signal.SIGCONT)
        return process.pid not in holders

    with holdfast.connect(url) as locks:
        eventually("the process is idle", idle)


def test_asyncio_runs_coroutines_and_functions_once(servers: Servers, tmp_path: Path) -> None:
    url = servers.of(RedisServer).url
    with fleet(tmp_path, HOLDFAST_URL=url, JOBS="coroutine function") as processes:
        start(processes, 3, "asyncio", "once")
        wait_for_runs(processes, "coroutine", 4)
        wait_for_runs(processes, "function", 1)
        assert_once_each(processes.journal, "coroutine")
        assert_once_each(processes.journal, "function")


def running(journal: Journal) -> int:
    """The process that is in the middle of a run; 0 if none is."""
    lines = journal.lines("begin", "end")
    return lines[-1].pid if lines and lines[-1].what == "begin" else 0


def overlaps(journal: Journal) -> int:
    """How many runs began while another one had not ended."""
    lines = journal.lines("begin", "end")
    pairs = pairwise(lines)
    return sum(one.what == other.what == "begin" for one, other in pairs)


def waited_for(locks: holdfast.Locks) -> int:
    """The process that runs a job which others wait for; 0 if there is none."""
    for info in locks.list("once/apscheduler"):
        if info.holders and info.waiters:
            return info.holders[0].pid
    return 0


@pytest.mark.parametrize("with_what", ["once", "take-over"])
def test_a_process_is_killed_in_the_middle(
    with_what: str, servers: Servers, tmp_path: Path
) -> None:
    """The run is lost, or taken over; the job goes on after the ttl."""
    url = servers.of(RedisServer).url
    settings = {"HOLDFAST_URL": url, "TTL": "3", "WORK": "2.5"}
    with fleet(tmp_path, JOBS=with_what, **settings) as processes, holdfast.connect(url) as locks:
        start(processes, 3, "threads", with_what)
        journal = processes.journal
        assert overlaps(journal) == 0, "not exclusive"
        found: list[int] = []

        def is_found() -> bool:
            pid = running(journal)
            if pid and with_what == "take-over" and waited_for(locks) != pid:
                return False
            found.append(pid)
            return bool(pid)

        eventually("a run is in the middle", is_found)
        victim = found[-1]
        os.kill(victim, signal.SIGKILL)
        begun = len(journal.lines("begin"))
        eventually("the job goes on", lambda: len(journal.lines("begin")) > begun)
        ran = len(journal.lines("ran"))
        eventually("it runs again", lambda: len(journal.lines("ran")) >= ran + 2)
        times = Counter(due_times(journal, with_what, "ran"))
        assert max(times.values()) == 1, "not exclusive"
        logs = "".join((tmp_path / f"log-{number}").read_text() for number in range(3))
        assert with_what == "once" or "takes over" in logs


def test_a_process_is_paused_past_its_ttl_in_the_middle(servers: Servers, tmp_path: Path) -> None:
    """The others go on; the paused one learns that its lock was lost."""
    settings = {"HOLDFAST_URL": servers.of(RedisServer).url, "TTL": "2", "WORK": "1.5"}
    with fleet(tmp_path, JOBS="cron", **settings) as processes:
        start(processes, 2, "threads", "once")
        journal = processes.journal
        eventually("a run is in the middle", lambda: running(journal))
        victim = running(journal)
        os.kill(victim, signal.SIGSTOP)
        begun = len(journal.lines("begin"))
        eventually("the other one goes on", lambda: len(journal.lines("begin")) >= begun + 2)
        os.kill(victim, signal.SIGCONT)
        eventually("it is told", lambda: journal.lines("error"))
        [error, *_] = journal.lines("error")
        assert (error.pid, error.words[2]) == (victim, "LockLost")
        assert max(Counter(due_times(journal, "cron", "ran")).values()) == 1, "not exclusive"


def test_an_interval_runs_once_however_late_a_process_comes_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interval of a day: the second process comes to it when the hour by which clocks may differ
    (here 0.1 s) and the grace have passed."""
    monkeypatch.setattr(holdfast.integrations.apscheduler, "CLOCK_SECONDS", 0.1)
    begins = datetime.fromtimestamp((time.time() // DAY_SECONDS + 1) * DAY_SECONDS, UTC)
    ran: list[str] = []
    with holdfast.connect("memory://") as locks:
        once = Once(ThreadPoolExecutor(1), locks)
        scheduler = BackgroundScheduler(executors={"default": once})
        job = scheduler.add_job(
            ran.append, "interval", ["ran"], days=1, id="report", misfire_grace_time=1
        )
        scheduler.start(paused=True)
        once.submit_job(job, [begins + timedelta(hours=1)])
        eventually("the first run", lambda: ran)
        time.sleep(1.5)  # the grace and 0.1 s
        once.submit_job(job, [begins + timedelta(hours=hours) for hours in (23, 25)])
        eventually("the run of the next interval", lambda: len(ran) >= 2)
        scheduler.shutdown()
    assert len(ran) == 2


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """For which a job waits; at the latest until the test ends."""
    event = threading.Event()
    yield event
    event.set()


def test_a_thread_whose_lock_is_lost_counts_until_it_ends(release: threading.Event) -> None:
    """It can't be stopped: another process must not begin beside it."""
    leases: list[holdfast.AsyncLease] = []

    def work(lease: Any = None) -> None:
        leases.append(lease)
        release.wait()

    async def live() -> None:
        async with process(work) as (one, locks), process(work) as (other, _):
            now = datetime.now(UTC)
            one(now)
            await soon(lambda: leases)
            [info] = await locks.list("once/")
            await locks.break_lock(info.name, reason="a test")
            await soon(lambda: not leases[0].held)
            await asyncio.sleep(0.2)
            skipped = other(now + SECOND)
            await soon(lambda: skipped or len(leases) > 1)
            release.set()
            assert (len(leases), [event.retval.value for event in skipped]) == (
                1,
                ["max_instances"],
            )

    asyncio.run(live())


async def soon(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def process(work: Callable[..., Any]) -> AsyncIterator[tuple[Callable[..., Any], Any]]:
    """A scheduler as of a process of its own: calls that submit a fire time, and its client."""
    async with holdfast.connect_async("memory://a-thread-is-lost") as locks:
        once = Once(AsyncIOExecutor(), locks, ttl=2)
        scheduler = AsyncIOScheduler(executors={"default": once})
        job = scheduler.add_job(work, "cron", hour=3, id="report")
        events: list[Any] = []
        scheduler.add_listener(events.append, EVENT_JOB_EXECUTED)
        scheduler.start(paused=True)

        def submit(due: datetime) -> list[Any]:
            once.submit_job(job, [due])
            return events

        yield submit, locks
        scheduler.shutdown()


def test_jobs_that_cannot_run_once_are_refused() -> None:
    """At the start of the scheduler, with what to do."""

    def scheduler(
        *args: object, keep: float | None = None, **options: object
    ) -> BackgroundScheduler:
        once = Once(ThreadPoolExecutor(1), locks, keep=keep)
        made = BackgroundScheduler(executors={"default": once})
        made.add_job(print, *args, **options)
        return made

    with holdfast.connect("memory://") as locks:
        with pytest.raises(ValueError, match=r"add_job\(…, id='…'\)"):
            scheduler("cron", hour=3).start()
        with pytest.raises(ValueError, match="jitter"):
            scheduler("cron", hour=3, id="a", jitter=5).start()
        with pytest.raises(ValueError, match="combined"):
            scheduler(OrTrigger([IntervalTrigger(hours=1)]), id="a").start()
        with pytest.raises(ValueError, match=r"keep=600 is shorter than its interval of 3600 s"):
            scheduler("interval", hours=1, id="a", keep=600).start()
        good = scheduler("cron", hour=3, id="a")
        good.start()
        good.shutdown()


def test_executors_that_do_not_fit_are_refused() -> None:
    with holdfast.connect("memory://") as locks:
        pool = ProcessPoolExecutor(1)
        with pytest.raises(TypeError, match="thread pool"):
            Once(pool, locks)
        pool.shutdown()
        with pytest.raises(TypeError, match="connect_async"):
            Once(AsyncIOExecutor(), locks)
        with pytest.raises(ValueError, match="ttl is a positive number"):
            Once(ThreadPoolExecutor(1), locks, ttl=0)
    with (
        holdfast.connect("redlock://a,b,c") as without_records,
        pytest.raises(holdfast.Unsupported, match="RECORDS"),
    ):
        Once(ThreadPoolExecutor(1), without_records)


def test_a_missing_extra_is_named() -> None:
    code = """
        import sys
        sys.modules["apscheduler"] = None
        import holdfast.integrations.apscheduler
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert "pip install 'holdfast[apscheduler]'" in done.stderr
