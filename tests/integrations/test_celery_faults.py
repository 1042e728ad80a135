"""Celery tasks and beats when something fails: in one process, with a broker in memory."""

# Celery has no types: its decorators are untyped.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import celery
import pytest
from celery import Celery, chain, chord
from celery.contrib.testing.worker import start_worker
from celery.exceptions import OperationalError

import holdfast
from holdfast import BackendUnavailable, Locks, LockTimeout
from holdfast.integrations import celery as ours
from holdfast.integrations import celery_beat
from holdfast.integrations.celery import Task, install
from integrations.processes import eventually

SECONDS = 30.0
numbers = itertools.count()


class Shop:
    """An app with a store in memory, and what its tasks have done."""

    def __init__(self, locks: Locks, **options: Any) -> None:
        name = f"faults-{next(numbers)}"
        self.app: Any = Celery(
            name, broker="memory://", backend="cache+memory://", set_as_current=False, **options
        )
        self.app.conf.task_default_queue = name  # the broker in memory is one for all apps
        self.locks, self.ran = locks, list[Any]()
        install(self.app, locks, beat="celery.beat:Scheduler")

    @contextmanager
    def worker(self) -> Iterator[None]:
        with start_worker(self.app, pool="solo", perform_ping_check=False, loglevel="ERROR"):
            yield

    def record(self, name: str) -> object:
        return self.locks.once(f"unique/{name}").outcome()


@pytest.fixture
def locks() -> Iterator[Locks]:
    with holdfast.connect(f"memory://faults-{next(numbers)}") as client:
        yield client


@pytest.fixture
def shop(locks: Locks, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.setattr(ours, "DELAY_SECONDS", (0.1, 0.1))
    return Shop(locks)


def away(*_: Any, **__: Any) -> Any:
    raise BackendUnavailable("the store is away")


def add_unique(shop: Shop, **options: Any) -> Any:
    """A task that is queued once per key."""

    @shop.app.task(shared=False, name="unique", unique="u:{key}", **options)
    def unique(key: str) -> str:
        shop.ran.append(key)
        return key

    return shop.app.tasks["unique"]


def test_a_task_that_waited_too_long_before_it_started_leaves_no_record(shop: Shop) -> None:
    task = add_unique(shop, serial="account:{key}", max_wait=0.2)
    with shop.worker():
        with shop.locks.lock("account:a"):
            first = task.delay("a")
            with pytest.raises(LockTimeout):
                first.get(timeout=SECONDS)
        second = task.delay("a")  # at once: the record is gone before the result is there
        assert second.id != first.id
        assert second.get(timeout=SECONDS) == "a"


def test_a_task_with_a_wrong_name_before_it_started_leaves_no_record(shop: Shop) -> None:
    task = add_unique(shop, serial="{key}\n")
    with shop.worker():
        with pytest.raises(holdfast.InvalidName):
            task.delay("a").get(timeout=SECONDS)
        assert shop.record("u:a") is None


def test_a_hook_that_fails_before_it_started_leaves_no_record(shop: Shop) -> None:
    def before_start(*_: Any) -> None:
        raise OSError("the hook")

    task = add_unique(shop, before_start=before_start)
    with shop.worker():
        with pytest.raises(OSError, match="the hook"):
            task.delay("a").get(timeout=SECONDS)
        eventually("the record is removed", lambda: shop.record("u:a") is None)
    assert shop.ran == []


def test_a_requeue_that_fails_before_it_started_leaves_no_record(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = add_unique(shop, serial="account:{key}")

    def refused(*_: Any, **__: Any) -> None:
        raise OperationalError("the broker is away")

    monkeypatch.setattr(task, "signature_from_request", refused)
    with shop.worker(), shop.locks.lock("account:a"):
        with pytest.raises(OperationalError):
            task.delay("a").get(timeout=SECONDS)
        assert shop.record("u:a") is None


def test_a_task_that_is_queued_again_keeps_its_record(shop: Shop) -> None:
    task = add_unique(shop, serial="account:{key}")
    with shop.worker():
        with shop.locks.lock("account:a"):
            first = task.delay("a")
            for _ in range(10):
                assert task.delay("a").id == first.id
                time.sleep(0.05)
        first.get(timeout=SECONDS)
    assert shop.ran == ["a"]


def add_body(shop: Shop) -> tuple[Any, Any]:
    """Tasks before and after a unique one."""

    @shop.app.task(shared=False, name="first")
    def first() -> str:
        return "a"

    @shop.app.task(shared=False, name="body")
    def body(value: Any) -> Any:
        shop.ran.append(("body", value))
        return value

    return shop.app.tasks["first"], shop.app.tasks["body"]


def test_a_canvas_ends_although_its_tasks_are_queued_already(shop: Shop) -> None:
    task, (first, body) = add_unique(shop), add_body(shop)
    queued = task.apply_async(("a",), countdown=3)
    with shop.worker():
        middle = chain(first.s(), task.s(), body.s()).apply_async()
        last = chain(first.s(), task.s()).apply_async()
        linked = task.apply_async(("a",), link=body.s())
        for result in (middle, last, linked):
            assert result.id != queued.id
            assert result.get(timeout=SECONDS, disable_sync_subtasks=False) == "a"
        eventually("the callback runs", lambda: shop.ran.count(("body", "a")) == 2)


def test_a_canvas_of_equal_tasks_runs_its_chord(shop: Shop) -> None:
    task, (_, body) = add_unique(shop), add_body(shop)
    with shop.worker():
        chord([task.s("a"), task.s("a")], body.s()).apply_async()
        eventually("the body runs", lambda: ("body", ["a", "a"]) in shop.ran)


def test_a_retry_is_published_while_the_store_is_away(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    @shop.app.task(shared=False, name="retried", bind=True, unique="r:{key}", max_retries=1)
    def retried(self: Any, key: str) -> str:
        shop.ran.append(self.request.retries)
        if self.request.retries == 0:
            with monkeypatch.context() as patch:
                patch.setattr(ours, "_record", away)
                raise self.retry(countdown=0)
        return key

    with shop.worker():
        assert shop.app.tasks["retried"].delay("a").get(timeout=SECONDS) == "a"
    assert shop.ran == [0, 1]


def test_a_record_that_fails_after_the_publishing_is_no_error(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = add_unique(shop)
    real = ours._record

    class Unwritten:
        def __init__(self, *args: Any) -> None:
            self.job = real(*args)

        def run(self, publish: Any) -> Any:
            self.job.run(publish)
            return away()

    with monkeypatch.context() as patch:
        patch.setattr(ours, "_record", Unwritten)
        result = task.delay("a")
    with shop.worker():
        assert result.get(timeout=SECONDS) == "a"
    monkeypatch.setattr(ours, "_record", away)
    with pytest.raises(BackendUnavailable):  # nothing is published: the caller must know
        task.delay("b")
    assert shop.ran == ["a"]


def test_a_task_that_is_delivered_again_waits_for_the_first(shop: Shop) -> None:
    task = add_unique(shop)
    with shop.worker():
        with shop.locks.lock("unique/u:a", note="the first"):
            again = celery.Task.apply_async(task, ("a",))
            time.sleep(1)
            assert shop.ran == [], "not exclusive"
        assert again.get(timeout=SECONDS) == "a"


def test_max_wait_begins_again_with_a_retry(shop: Shop) -> None:
    @shop.app.task(shared=False, name="again", bind=True, serial="s:{key}", max_wait=1.5)
    def again(self: Any, key: str) -> None:
        shop.ran.append(ours.BUSY in (self.request.headers or {}))
        if self.request.retries == 0:
            time.sleep(1)
            raise self.retry(countdown=0.5)

    busy = shop.locks.lock("s:a", timeout=SECONDS)
    with shop.worker():
        with busy:
            result = shop.app.tasks["again"].delay("a")
            time.sleep(1)  # it waits for a second before its first run,
        eventually("it runs", lambda: shop.ran)
        with busy:
            time.sleep(1)  # and for half a second before its second
        result.get(timeout=SECONDS)
    assert shop.ran == [False, False]


def test_a_result_that_the_task_s_own_code_can_not_keep_is_its_error(shop: Shop) -> None:
    @shop.app.task(shared=False, name="nested", once="o:{key}")
    def nested(key: str) -> object:
        return shop.locks.once("inner").run(object).value

    @shop.app.task(shared=False, name="unkept", once="p:{key}")
    def unkept(key: str) -> Any:
        return datetime(2026, 1, 1, tzinfo=UTC)  # JSON of Celery holds it

    with shop.worker():
        with pytest.raises(holdfast.ResultNotKept, match="inner"):
            shop.app.tasks["nested"].delay("a").get(timeout=SECONDS)
        assert shop.locks.once("o:a").outcome() is None
        assert shop.app.tasks["unkept"].delay("a").get(timeout=SECONDS).year == 2026


class Mine(celery.Task):  # type: ignore[type-arg]
    """A task class as of an app with contexts."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        Mine.calls += 1
        return super().__call__(*args, **kwargs)


class MineWithOurs(Task):
    """A task class that knows our options."""


def test_the_task_class_of_an_app_is_kept(locks: Locks) -> None:
    Mine.calls = 0
    shop = Shop(locks, task_cls=f"{__name__}:Mine")

    @shop.app.task(shared=False, name="task", bind=True, serial="s:{key}", once=True)
    def task(self: Any, key: str) -> Any:
        return [isinstance(self, Mine), isinstance(self, Task), self.request.called_directly]

    with shop.worker():
        found = shop.app.tasks["task"].delay("a").get(timeout=SECONDS)
    assert found == [True, True, False]
    assert Mine.calls == 1
    assert Shop(locks, task_cls=MineWithOurs).app.task_cls is MineWithOurs


@pytest.mark.parametrize("option", ["serial", "unique", "once"])
def test_options_of_a_task_of_another_base_are_refused(locks: Locks, option: str) -> None:
    shop = Shop(locks)

    @shop.app.task(shared=False, name="fits", base=MineWithOurs, **{option: "a:{key}"})
    def fits(key: str) -> None: ...

    @shop.app.task(shared=False, name="other", base=Mine, **{option: "a:{key}"})
    def other(key: str) -> None: ...

    with pytest.raises(TypeError, match=rf"other: {option}= needs"):
        shop.app.finalize()


def beat_of(shop: Shop, *names: str) -> celery_beat.Beat:
    shop.app.conf.beat_schedule = {name: {"task": "unknown", "schedule": 3600.0} for name in names}
    return celery_beat.Beat(shop.app)


@pytest.mark.parametrize("name", ["long " * 300, "ä" * 300, "two\nlines", "", "\udc80"])
def test_a_beat_records_an_entry_of_any_name(shop: Shop, name: str) -> None:
    first = beat_of(shop, name)
    first.tick()
    sent = first.schedule[name].last_run_at
    first.close()
    second = beat_of(shop, name)
    second.tick()
    assert second.schedule[name].last_run_at == sent
    second.close()


def test_a_record_that_fails_does_not_cost_the_lead(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = celery_beat.Beat._job

    def job(self: Any, name: str) -> Any:
        if name == "broken":
            raise holdfast.Incompatible("the record of another version")
        return real(self, name)

    monkeypatch.setattr(celery_beat.Beat, "_job", job)
    beat = beat_of(shop, "broken", "whole")
    beat.tick()
    assert set(beat.schedule) >= {"broken", "whole"}  # it leads
    assert beat._job("whole").outcome() is not None
    beat.close()
