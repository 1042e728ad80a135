"""Celery with real workers and beats: duplicates without us, none with us."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

import holdfast
from holdfast.integrations.celery import Task, install, installed
from integrations.celery_program import TTL, make_app
from integrations.processes import Fleet, Line, eventually, fleet
from servers.redis import RedisServer
from servers.tree import signal_all

CELERY = ["-m", "celery", "-A", "integrations.celery_program"]
QUIET = ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "INFO"]
SECONDS = 60.0
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "celery.md"


class Shop:
    """A broker, a store, workers, and the app as a producer has it."""

    def __init__(self, processes: Fleet, broker: RedisServer, store: RedisServer | None) -> None:
        self.processes, self.journal = processes, processes.journal
        self.broker, self.store = broker, store
        address = broker.url.removesuffix("/0")
        url = "" if store is None else store.url
        processes.environment |= {"BROKER": address, "HOLDFAST_URL": url}
        self.app = make_app(address, url)

    def close(self) -> None:
        """Ends what the producer has opened."""
        gc.collect()  # a result unsubscribes when it is collected, which needs the broker
        self.app.close()
        if self.store is not None:
            installed(self.app)[0].close()

    def worker(self, pool: str, count: int) -> subprocess.Popen[bytes]:
        """Starts a worker and waits until it takes tasks."""
        number = len(self.processes.processes)
        command = [*CELERY, "worker", "-P", pool, "-c", str(count), "-n", f"w{number}@here", *QUIET]
        process = self.processes.start(command)
        log = self.processes.folder / f"log-{number}"
        eventually("the worker is ready", lambda: " ready." in log.read_text())
        return process

    def beat(self) -> subprocess.Popen[bytes]:
        """Starts a beat with a schedule file of its own, as on a host of its own."""
        number = len(self.processes.processes)
        return self.processes.start([*CELERY, "beat", "-l", "INFO", "-s", f"schedule-{number}"])

    def send(self, task: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        result: AsyncResult[Any] = self.app.tasks[task].apply_async(args, **options)
        return result

    def lines(self, name: str, what: str = "begin") -> list[Line]:
        return [line for line in self.journal.lines(what) if line.words[0] == name]

    def begun(self, name: str, count: int = 1) -> Line:
        """Waits until so many runs of a name have begun; returns the last line."""
        eventually(f"{name} runs", lambda: len(self.lines(name)) >= count)
        return self.lines(name)[-1]

    def most_at_once(self, name: str) -> int:
        """How many runs of a name there were at the same time."""
        running = most = 0
        for line in self.journal.lines("begin", "end"):
            if line.words[0] == name:
                running += 1 if line.what == "begin" else -1
                most = max(most, running)
        return most


@pytest.fixture(scope="module")
def broker() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def shop(broker: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """Two workers, of processes and of threads, on one broker."""
    with RedisServer() as store, fleet(tmp_path_factory.mktemp("shop")) as processes:
        found = Shop(processes, broker, store)
        found.worker("prefork", 4)
        found.worker("threads", 4)
        yield found
        found.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Shop]:
    """A broker and a store of its own, without workers."""
    with RedisServer() as broker, RedisServer(persist=True) as store, fleet(tmp_path) as processes:
        found = Shop(processes, broker, store)
        yield found
        found.close()


def all_done(results: list[AsyncResult[Any]]) -> list[Any]:
    return [result.get(timeout=SECONDS) for result in results]


def test_without_us_tasks_overlap_and_are_queued_twice(shop: Shop) -> None:
    all_done([shop.send("plain", "without", 0.2) for _ in range(12)])
    assert shop.most_at_once("without") > 1
    assert len(shop.lines("without")) == 12


def test_a_serial_task_runs_one_at_a_time(shop: Shop) -> None:
    """A busy one goes back to the queue, and that is no retry: the task allows none."""
    tokens = all_done([shop.send("serial", "a", 0.2) for _ in range(12)])
    assert shop.most_at_once("a") == 1, "not exclusive"
    assert len(set(tokens)) == 12
    assert {line.words[2] for line in shop.lines("a")} == {"0"}
    in_order = [int(line.words[1]) for line in shop.lines("a")]
    assert in_order == sorted(in_order), "not exclusive"
    assert len({line.pid for line in shop.lines("a")}) > 1


def test_tasks_of_other_names_do_not_wait(shop: Shop) -> None:
    all_done([shop.send("serial", name, 1) for name in ("b1", "b2")])
    first, second = shop.lines("b1")[0], shop.lines("b2")[0]
    ends = [line.at for line in shop.journal.lines("end") if line.words[0] in ("b1", "b2")]
    assert max(first.at, second.at) < min(ends)


def test_a_task_waits_no_longer_than_max_wait(shop: Shop) -> None:
    with installed(shop.app)[0].lock("account:c", note="the test"):
        result = shop.send("waits", "c")
        with pytest.raises(holdfast.LockTimeout, match="the test"):
            result.get(timeout=SECONDS)
    assert shop.lines("c") == []


def test_time_limits(alone: Shop) -> None:
    """A soft one frees the lock at once, a hard one lock and name after the ttl."""
    alone.worker("prefork", 3)
    soft = alone.send("soft", "d")
    hard = alone.send("hard", "e", 60)
    alone.begun("d")
    following = alone.send("serial", "d", 0)
    alone.begun("e")
    assert alone.send("hard", "e", 0).id == hard.id  # not queued twice
    with pytest.raises(Exception, match="SoftTimeLimitExceeded"):
        soft.get(timeout=SECONDS)
    following.get(timeout=SECONDS)
    with pytest.raises(Exception, match="TimeLimitExceeded"):
        hard.get(timeout=SECONDS)
    eventually("it is queued again", lambda: alone.send("hard", "e", 0).id != hard.id)
    alone.begun("e", 2)


def test_a_unique_task_is_queued_once_until_it_starts(shop: Shop) -> None:
    ids = {shop.send("until_start", "f", 1.5, countdown=1.5).id for _ in range(5)}
    assert len(ids) == 1
    shop.begun("f")
    following = shop.send("until_start", "f", 0)
    assert following.id not in ids
    following.get(timeout=SECONDS)
    eventually("both have run", lambda: len(shop.lines("f", "end")) == 2)


def test_a_unique_task_is_queued_once_until_it_is_done(shop: Shop) -> None:
    first = shop.send("until_done", "g", 1.5, countdown=1)
    assert shop.send("until_done", "g", 0).id == first.id
    shop.begun("g")
    assert shop.send("until_done", "g", 0).id == first.id
    first.get(timeout=SECONDS)
    eventually("the name is free", lambda: shop.send("until_done", "g", 0).id != first.id)
    shop.begun("g", 2)


def test_a_retry_keeps_its_name(shop: Shop) -> None:
    """Also while it is in the queue for its retry."""
    first = shop.send("retried", "h")
    others = 0
    while len(shop.lines("h", "end")) < 2:  # a third run is to come
        sent = shop.send("retried", "h")
        if len(shop.lines("h", "end")) < 2:
            assert sent.id == first.id
            others += 1
        time.sleep(0.05)
    assert others > 5
    assert first.get(timeout=SECONDS) == "done"
    assert [line.words[1] for line in shop.lines("h")][:3] == ["0", "1", "2"]


def test_a_task_that_expired_or_was_revoked_frees_its_name(shop: Shop) -> None:
    expired = shop.send("until_done", "i", 0, countdown=2, expires=1)
    revoked = shop.send("until_done", "j", 0, countdown=2)
    assert shop.send("until_done", "i", 0).id == expired.id
    shop.app.control.revoke(revoked.id)
    eventually("the name is free", lambda: shop.send("until_done", "i", 0).id != expired.id)
    eventually("the name is free", lambda: shop.send("until_done", "j", 0).id != revoked.id)
    shop.begun("i")
    shop.begun("j")
    assert str(shop.app.AsyncResult(revoked.id).state) == "REVOKED"


def test_a_broker_that_is_down_leaves_no_name(tmp_path: Path, shop: Shop) -> None:
    app = make_app("redis://127.0.0.1:1", shop.processes.environment["HOLDFAST_URL"])
    app.conf.update(task_publish_retry=False, result_backend="disabled://")
    with pytest.raises(Exception, match="refused"):
        app.tasks["until_done"].delay("k", 0)
    shop.send("until_done", "k", 0)
    shop.begun("k")
    installed(app)[0].close()
    app.close()


def test_once_returns_the_recorded_result(shop: Shop) -> None:
    results = all_done([shop.send("once", "7", 0.5) for _ in range(6)])
    assert len(shop.lines("7")) == 1, "not exclusive"
    assert len({result["by"] for result in results}) == 1


def test_once_lets_a_retry_run(shop: Shop) -> None:
    assert shop.send("fails_first", "8").get(timeout=SECONDS) == "second"
    assert len(shop.lines("8")) == 2


def test_a_task_that_is_delivered_twice_runs_once(alone: Shop) -> None:
    """The broker delivers what is not acknowledged within its visibility_timeout again."""
    alone.processes.environment["REDELIVER"] = "soon"
    alone.worker("prefork", 4)
    alone.worker("prefork", 4)
    plain, ours = alone.send("late", "without", 6), alone.send("late_once", "with", 6)
    eventually("the broker delivers again", lambda: len(alone.lines("without")) > 1)
    delivered = "late_once[" + ours.id + "] received"
    logs = [alone.processes.folder / f"log-{number}" for number in range(2)]
    eventually(
        "it is delivered again, too",
        lambda: sum(log.read_text().count(delivered) for log in logs) > 1,
    )
    all_done([plain, ours])
    assert len(alone.lines("with")) == 1, "not exclusive"


def test_a_worker_is_killed(alone: Shop) -> None:
    """Its lock and its name are free after the ttl; nothing has to be cleaned up."""
    victim = alone.worker("prefork", 2)
    alone.send("serial", "a", 60)
    held = alone.send("until_done", "b", 60)
    alone.begun("a")
    alone.begun("b")
    signal_all(victim.pid, signal.SIGKILL)
    victim.wait()
    killed = time.time()
    alone.worker("prefork", 2)
    alone.send("serial", "a", 0).get(timeout=SECONDS)
    eventually("the name is free", lambda: alone.send("until_done", "b", 0).id != held.id)
    alone.begun("b", 2)
    assert alone.lines("a")[1].at < killed + TTL + 20


def test_a_worker_is_paused_past_its_ttl(alone: Shop) -> None:
    """Another one runs the next task; the paused one fails with LockLost."""
    worker = alone.worker("prefork", 1)
    paused = alone.send("serial", "a", 1)
    alone.begun("a")
    signal_all(worker.pid, signal.SIGSTOP)
    alone.worker("threads", 1)
    for _ in range(3):  # Redis may still give one to the connection of the paused worker
        alone.send("serial", "a", 0)
    alone.begun("a", 2)
    signal_all(worker.pid, signal.SIGCONT)
    with pytest.raises(holdfast.LockLost):
        paused.get(timeout=SECONDS)
    first, second = (int(line.words[1]) for line in alone.lines("a")[:2])
    assert first < second, "not exclusive"


def test_the_store_is_restarted(alone: Shop) -> None:
    """Tasks go back to the queue while it is down."""
    assert alone.store is not None
    alone.worker("prefork", 2)
    alone.worker("threads", 2)
    results = [alone.send("serial", "a", 0.1) for _ in range(6)]
    alone.begun("a", 2)
    alone.store.kill()
    time.sleep(1)
    alone.store.restart()
    for result in results:
        result.get(timeout=SECONDS, propagate=False)
    states = [result.state for result in results]
    assert states.count("SUCCESS") >= 5, states  # one was running when the store went away
    assert alone.most_at_once("a") == 1, "not exclusive"


def test_a_worker_is_killed_in_the_middle_of_a_job(alone: Shop) -> None:
    """The broker delivers the message again, and another worker takes the job over."""
    alone.processes.environment["REDELIVER"] = "soon"
    victim = alone.worker("prefork", 1)
    result = alone.send("late_once", "a", 4)
    alone.begun("a")
    signal_all(victim.pid, signal.SIGKILL)
    victim.wait()
    alone.worker("threads", 2)
    result.get(timeout=SECONDS)
    assert (len(alone.lines("a")), len(alone.lines("a", "end"))) == (2, 1)
    assert alone.lines("a")[0].at + TTL / 2 < alone.lines("a")[1].at, "not exclusive"


def test_a_worker_is_paused_past_its_ttl_in_the_middle_of_a_job(alone: Shop) -> None:
    """The names are free for others; the late outcome of a job is refused."""
    worker = alone.worker("prefork", 2)
    paused = alone.send("once", "a", 1)
    queued = alone.send("until_done", "b", 1)
    alone.begun("a")
    alone.begun("b")
    signal_all(worker.pid, signal.SIGSTOP)
    alone.worker("threads", 2)
    taken = [
        alone.send("once", "a", 0) for _ in range(3)
    ]  # some for the paused worker's connection
    eventually("the name is free", lambda: alone.send("until_done", "b", 0).id != queued.id)
    alone.begun("a", 2)
    signal_all(worker.pid, signal.SIGCONT)
    with pytest.raises(holdfast.LockLost):
        paused.get(timeout=SECONDS)
    assert len({result["by"] for result in all_done(taken)}) == 1
    assert len(alone.lines("a")) == 2, "not exclusive"


def test_the_store_is_restarted_with_queued_tasks_and_jobs(alone: Shop) -> None:
    """What it had acknowledged is still there: no task is queued twice, and no job runs twice."""
    assert alone.store is not None
    alone.worker("threads", 4)
    queued = alone.send("until_done", "a", 0, countdown=6)
    alone.send("once", "b", 0).get(timeout=SECONDS)
    alone.store.kill()
    waiting = alone.send("once", "b", 0)  # delivered while the store is away
    time.sleep(1)
    alone.store.restart()
    assert alone.send("until_done", "a", 0).id == queued.id
    assert waiting.get(timeout=SECONDS) == alone.send("once", "b", 0).get(timeout=SECONDS)
    queued.get(timeout=SECONDS)
    assert (len(alone.lines("a")), len(alone.lines("b"))) == (1, 1), "not exclusive"


def ticks_per_second(shop: Shop, seconds: float) -> float:
    """How often the entry of each second was sent."""
    before, started = len(shop.journal.lines("tick")), time.time()
    time.sleep(seconds)
    return (len(shop.journal.lines("tick")) - before) / (time.time() - started)


def test_without_us_each_beat_sends(tmp_path: Path, broker: RedisServer) -> None:
    with RedisServer() as own, fleet(tmp_path) as processes:
        shop = Shop(processes, own, None)
        shop.worker("threads", 2)
        shop.beat()
        shop.beat()
        eventually("both send", lambda: ticks_per_second(shop, 3) > 1.5)
        shop.close()


def test_one_beat_sends_and_another_takes_over(alone: Shop) -> None:
    alone.worker("threads", 2)
    leader = alone.beat()
    eventually("it sends", lambda: len(alone.journal.lines("tick")) > 1)
    standby = alone.beat()
    before = len(alone.journal.lines("tick"))
    assert ticks_per_second(alone, 4) < 1.3
    assert len(alone.journal.lines("tick")) > before

    os.kill(leader.pid, signal.SIGSTOP)  # past its ttl
    before = len(alone.journal.lines("tick"))
    eventually("the other sends", lambda: len(alone.journal.lines("tick")) > before + 1)
    os.kill(leader.pid, signal.SIGCONT)
    assert ticks_per_second(alone, 4) < 1.3
    assert leader.poll() is None, "the loser stands by"

    standby.send_signal(signal.SIGTERM)  # a planned end is no gap of a ttl
    standby.wait(20)
    before = len(alone.journal.lines("tick"))
    eventually("the first sends again", lambda: len(alone.journal.lines("tick")) > before)


def test_a_beat_is_killed_and_the_store_restarted(alone: Shop) -> None:
    """The one that is left leads after the ttl, and only one of them ever sends."""
    assert alone.store is not None
    alone.worker("threads", 2)
    leader = alone.beat()
    eventually("it sends", lambda: len(alone.journal.lines("tick")) > 1)
    alone.beat()
    alone.store.kill()
    time.sleep(1)
    alone.store.restart()
    before = len(alone.journal.lines("tick"))
    eventually("one of them sends", lambda: len(alone.journal.lines("tick")) > before + 1)
    assert ticks_per_second(alone, 4) < 1.3

    leader.kill()
    before = len(alone.journal.lines("tick"))
    eventually("the other sends", lambda: len(alone.journal.lines("tick")) > before + 1)
    alone.beat()
    assert ticks_per_second(alone, 4) < 1.3


def test_the_program_of_the_guide_runs(alone: Shop) -> None:
    assert alone.store is not None
    found = re.search(r"```py\n(# shop\.py\n.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    program = found[1].replace("redis://localhost", alone.store.url.removesuffix("/0"))
    (alone.processes.folder / "shop.py").write_text(program)
    worker = alone.processes.start(["-m", "celery", "-A", "shop", "worker", "-l", "INFO", "-c2"])
    client = """
        from shop import book, rebuild, send_invoice
        book.delay(42, 10).get(timeout=60)
        first = rebuild.apply_async((7,), countdown=3)
        assert rebuild.delay(7).id == first.id
        send_invoice.delay("9").get(timeout=60)
    """
    done = alone.processes.start(["-c", textwrap.dedent(client)])
    assert done.wait(90) == 0
    worker.terminate()
    worker.wait(60)


def test_options_that_do_not_fit_are_refused() -> None:
    app = Celery("refused", set_as_current=False)
    with holdfast.connect("memory://") as locks:
        install(app, locks)

        @app.task(shared=False, serial="account:{account_id}")
        def wrong(account: str) -> None: ...

        with pytest.raises(ValueError, match="wrong has no argument 'account_id'"):
            app.finalize()
        with pytest.raises(RuntimeError, match="before the first task"):
            install(app, locks)
    with pytest.raises(RuntimeError, match=r"install\(app\)"):
        installed(Celery("bare", task_cls=Task, set_as_current=False))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"serial": 5}, TypeError, "serial is a name"),
        ({"unique": True}, TypeError, "unique is a name"),
        ({"serial": "a", "max_wait": "1m"}, TypeError, "max_wait is a number of seconds; not '1m'"),
        ({"serial": "a", "max_wait": -1}, ValueError, "max_wait"),
        ({"once": True, "keep": "7d"}, TypeError, "keep"),
        ({"unique": "a", "keep": -1}, ValueError, "keep"),
        ({"unique": "a", "until": "end"}, ValueError, "until"),
    ],
)
def test_an_option_that_can_not_be_is_refused_when_the_app_starts(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with holdfast.connect("memory://") as locks, pytest.raises(error, match=says):
        finalize(locks, **options)


@pytest.mark.parametrize("options", [{"unique": "a"}, {"once": "a"}])
def test_a_store_without_records_is_refused_when_the_app_starts(options: dict[str, Any]) -> None:
    with holdfast.connect("redlock://a,b,c") as locks:
        finalize(locks, serial="a")
        with pytest.raises(holdfast.Unsupported, match="RECORDS"):
            finalize(locks, **options)


def finalize(locks: holdfast.Locks, **options: Any) -> None:
    """Makes an app with one task."""
    app = Celery("one", set_as_current=False)
    install(app, locks)

    @app.task(shared=False, **options)
    def one() -> None: ...

    app.finalize()


def test_a_direct_call_runs_the_function_only() -> None:
    app = Celery("direct", set_as_current=False)
    with holdfast.connect("memory://") as locks:
        install(app, locks)

        @app.task(shared=False, serial="account:{account}", unique="x:{account}")
        def task(account: str) -> bool:
            return locks.lock(f"account:{account}").locked()

        assert task("a") is False
        assert task.apply(("a",)).get() is True


@pytest.mark.parametrize("module", ["celery", "celery_beat"])
def test_a_missing_extra_is_named(module: str) -> None:
    code = f"""
        import sys
        sys.modules["celery"] = None
        import holdfast.integrations.{module}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert "pip install 'holdfast[celery]'" in done.stderr
