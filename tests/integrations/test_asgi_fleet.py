"""Jobs of which one worker of many runs each, on real application servers."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import connect_async
from holdfast.integrations.asgi import Fleet, lifespan
from integrations.web import (
    GUNICORN,
    PATIENT_SECONDS,
    SERVERS,
    UVICORN,
    WORKERS,
    Application,
    serving,
)
from servers.process import wait_until
from servers.redis import RedisServer
from servers.registry import Servers

SECONDS = 90.0
RUNS = 5
TTL_SECONDS = 3.0
"""That of the application."""
SHUTDOWN = "Waiting for application shutdown"


@pytest.fixture
def store(servers: Servers) -> str:
    return servers.of(RedisServer).url


@pytest.fixture
def own_store() -> Iterator[RedisServer]:
    """A server that a test may restart."""
    with RedisServer(persist=True) as server:
        yield server


def wait_for(application: Application, event: str, count: int = 1) -> list[dict[str, Any]]:
    """The lines of an event, when there are so many."""
    journal = application.journal
    wait_until(f"{count} {event}", lambda: len(journal.read(event)) >= count, SECONDS)
    return journal.read(event)


def runs_per_interval(application: Application) -> Counter[float]:
    """How often each interval was run, when there are enough of them."""
    journal = application.journal
    wait_until("runs", lambda: len({r["due"] for r in journal.read("end")}) >= RUNS, SECONDS)
    return Counter(run["due"] for run in journal.read("end"))


def test_without_a_fleet_every_worker_runs_the_job(tmp_path: Path, store: str) -> None:
    """The failure that people report."""
    with serving("integrations.naive_app:app", store, tmp_path) as application:
        assert max(runs_per_interval(application).values()) == WORKERS


@pytest.mark.parametrize("command", SERVERS.values(), ids=SERVERS)
def test_one_worker_runs_each_interval(command: Any, tmp_path: Path, store: str) -> None:
    """No interval twice, and none left out."""
    app = "integrations.fleet_app:app"
    with serving(app, store, tmp_path, command=command, JOBS="sweep") as application:
        counts = runs_per_interval(application)
        runs = application.journal.read("end")
        assert set(counts.values()) == {1}
        assert sorted(counts) == [min(counts) + n for n in range(len(counts))]
        assert [run["token"] for run in runs] == sorted({run["token"] for run in runs})
        assert len({line["pid"] for line in application.journal.read("start")}) == WORKERS
        assert all(line["has_locks"] for line in application.journal.read("start"))
    assert len(application.journal.read("stop")) == WORKERS


@pytest.mark.parametrize("command", [UVICORN, GUNICORN], ids=["uvicorn", "gunicorn"])
def test_a_killed_worker_is_replaced(command: Any, tmp_path: Path, store: str) -> None:
    """In the middle of a job that is due once a day: another worker runs it, and not tomorrow."""
    app = "integrations.fleet_app:app"
    with serving(app, store, tmp_path, command=command, JOBS="daily") as application:
        [first] = wait_for(application, "begin")
        os.kill(first["pid"], signal.SIGKILL)
        second = wait_for(application, "begin", 2)[1]
        assert second["pid"] != first["pid"]
        assert second["due"] == first["due"]
        assert second["token"] > first["token"]
        application.journal.write("finish")
        [end] = wait_for(application, "end")
        assert end["token"] == second["token"]


def test_a_worker_that_is_paused_past_its_ttl_does_not_finish(tmp_path: Path, store: str) -> None:
    app = "integrations.fleet_app:app"
    with serving(app, store, tmp_path, health=PATIENT_SECONDS, JOBS="daily") as application:
        [first] = wait_for(application, "begin")
        os.kill(first["pid"], signal.SIGSTOP)
        try:
            second = wait_for(application, "begin", 2)[1]
        finally:
            os.kill(first["pid"], signal.SIGCONT)
        [cancelled] = wait_for(application, "cancelled")
        assert cancelled["token"] == first["token"] < second["token"]
        application.journal.write("finish")
        wait_for(application, "end")
    assert [end["token"] for end in application.journal.read("end")] == [second["token"]]


def test_a_restarted_store_neither_doubles_nor_stops_the_job(
    tmp_path: Path, own_store: RedisServer
) -> None:
    app = "integrations.fleet_app:app"
    with serving(app, own_store.url, tmp_path, JOBS="sweep") as application:
        runs_per_interval(application)
        own_store.restart()
        before = len(application.journal.read("end"))
        wait_for(application, "end", before + RUNS)
        counts = runs_per_interval(application)
        assert set(counts.values()) == {1}
        assert sorted(counts) == [min(counts) + n for n in range(len(counts))]


def test_a_job_in_a_thread_keeps_its_lock_until_it_ends(tmp_path: Path, store: str) -> None:
    """Also when its worker is told to stop: a thread can't be cancelled."""
    app = "integrations.fleet_app:app"
    with serving(app, store, tmp_path, command=GUNICORN, JOBS="thread") as application:
        [first] = wait_for(application, "begin")
        os.kill(first["pid"], signal.SIGTERM)
        wait_until("the stop", lambda: SHUTDOWN in application.log.read_text(), SECONDS)
        assert len(application.journal.read("begin")) == 1
        application.journal.write("finish")
        [end] = wait_for(application, "end")
        assert (end["pid"], end["held"]) == (first["pid"], True)
        assert len(application.journal.read("begin")) == 1


async def soon(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_a_thread_that_has_lost_its_lock_ends_before_its_worker() -> None:
    """It is waited for twice: when the lock is lost, and when the worker stops meanwhile."""
    leases: list[Any] = []
    ended: list[bool] = []
    release = threading.Event()
    jobs = Fleet()

    @jobs.every(3600)
    def work(lease: Any) -> None:
        leases.append(lease)
        release.wait(SECONDS)
        ended.append(True)

    async def live() -> None:
        async with connect_async("memory://", ttl=2) as locks:
            async with jobs.run(locks):
                await soon(lambda: leases)
                [info] = await locks.list()
                await locks.break_lock(info.name, reason="a test")
                await soon(lambda: not leases[0].held)
                await asyncio.sleep(0.1)
                threading.Timer(0.3, release.set).start()
            assert ended == [True]

    asyncio.run(live())


@pytest.mark.parametrize("kind", ["every", "leader"])
def test_a_job_that_swallows_its_cancellation_is_not_run_again(kind: str) -> None:
    """The worker stops, and the job with it."""
    seen: list[str] = []
    jobs = Fleet()

    @(jobs.every(3600) if kind == "every" else jobs.leader())
    async def work() -> None:
        seen.append("begin")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            if len(seen) > 2:  # so that this test ends where it fails
                raise

    async def live() -> None:
        async with connect_async("memory://") as locks, asyncio.timeout(5), jobs.run(locks):
            await soon(lambda: seen)

    asyncio.run(live())
    assert seen == ["begin", "cancelled"]


def test_a_failing_job_is_tried_again_at_the_next_interval(tmp_path: Path, store: str) -> None:
    with serving("integrations.fleet_app:app", store, tmp_path, JOBS="failing") as application:
        wait_for(application, "failing", 3)
    assert "no orders today" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("command", SERVERS.values(), ids=SERVERS)
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_another_worker_takes_the_lead(
    command: Any, kind: signal.Signals, tmp_path: Path, store: str
) -> None:
    app = "integrations.fleet_app:app"
    with serving(app, store, tmp_path, command=command, JOBS="leader") as application:
        [first] = wait_for(application, "lead")
        os.kill(first["pid"], kind)
        second = wait_for(application, "lead", 2)[1]
        assert second["pid"] != first["pid"]
        assert second["token"] > first["token"]
        assert len(application.journal.read("lead")) == 2


def test_a_paused_leader_stops(tmp_path: Path, store: str) -> None:
    app = "integrations.fleet_app:app"
    with serving(app, store, tmp_path, health=PATIENT_SECONDS, JOBS="leader") as application:
        [first] = wait_for(application, "lead")
        os.kill(first["pid"], signal.SIGSTOP)
        try:
            second = wait_for(application, "lead", 2)[1]
        finally:
            os.kill(first["pid"], signal.SIGCONT)
        stopped = wait_for(application, "follow")[0]
        assert stopped["token"] == first["token"] < second["token"]


def test_a_restarted_store_has_one_leader(tmp_path: Path, own_store: RedisServer) -> None:
    """The same one, or another one when that has stopped."""
    app = "integrations.fleet_app:app"
    with serving(app, own_store.url, tmp_path, JOBS="leader") as application:
        wait_for(application, "lead")
        own_store.restart()
        time.sleep(2 * TTL_SECONDS)
        journal = application.journal
        leads, ends = ([line["token"] for line in journal.read(w)] for w in ("lead", "follow"))
        assert leads == sorted(set(leads)), "not exclusive"
        assert ends == leads[:-1], "not exclusive"


def test_start_up_work_is_done_once_per_deploy(tmp_path: Path, store: str) -> None:
    """The worker that does it is killed: another one does it, and no worker serves before."""
    app = "integrations.fleet_app:app"
    with serving(
        app, store, tmp_path, wait=False, command=GUNICORN, JOBS="warm", SLOW_START="1"
    ) as application:
        [first] = wait_for(application, "begin")
        os.kill(first["pid"], signal.SIGKILL)
        assert wait_for(application, "begin", 2)[1]["pid"] != first["pid"]
        application.journal.write("finish")
        wait_until("the application", application.answers, SECONDS)
        assert len(application.journal.read("end")) == 1
        order = [line["event"] for line in application.journal.read()]
        assert order.index("end") < order.index("served")


def test_a_job_is_named_once() -> None:
    """Two functions of one name would never both run."""

    async def sweep() -> None: ...

    jobs = Fleet()
    jobs.every(1)(sweep)
    with pytest.raises(ValueError, match="two jobs are called"):
        jobs.every(1, f"{sweep.__module__}.{sweep.__qualname__}")(_leads)


def test_jobs_that_are_declared_in_a_loop_need_names() -> None:
    """Only the last one would run."""
    jobs = Fleet()

    def declare(tenant: str, name: str | None = None) -> None:
        @jobs.every(60, name)
        async def sweep() -> None:
            print(tenant)

    declare("a")
    with pytest.raises(ValueError, match=r"declared again.*name=.*in a loop"):
        declare("b")
    for tenant in ("b", "c"):
        declare(tenant, f"sweep-{tenant}")


def test_a_module_may_be_imported_again(tmp_path: Path) -> None:
    """By a reloader, or as __main__ and by its name: its jobs are the same."""
    module = tmp_path / "jobs.py"
    module.write_text("@jobs.every(60)\nasync def sweep(): ...\n")
    jobs = Fleet()
    for _ in range(2):
        runpy.run_path(str(module), {"jobs": jobs})


async def _leads() -> None: ...


def test_what_can_not_work_is_refused_at_once() -> None:
    jobs = Fleet()
    with pytest.raises(TypeError, match="async def"):
        jobs.leader()(lambda: None)
    with pytest.raises(ValueError, match="release"):
        jobs.once_per_deploy("")


def test_a_wrong_option_stops_the_start() -> None:
    """An application that starts without its job would be noticed much later."""

    async def start() -> None:
        jobs = Fleet()
        jobs.every(60, mised="skip")(_leads)
        async with lifespan("memory://", fleet=jobs)(SimpleNamespace(state=SimpleNamespace())):
            raise AssertionError("it started")

    with pytest.raises(TypeError, match="mised"):
        asyncio.run(start())


@pytest.mark.parametrize(
    ("module", "framework", "extra"),
    [(name, name, name) for name in ("fastapi", "alembic", "pytest")],
)
def test_a_missing_framework_is_named(module: str, framework: str, extra: str) -> None:
    code = f"import sys; sys.modules[{framework!r}] = None; import holdfast.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"pip install 'holdfast[{extra}]'" in done.stderr
