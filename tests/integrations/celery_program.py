"""A Celery app for test_celery; its tasks append lines to the file JOURNAL."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.schedules import schedule

import holdfast
from holdfast.integrations.celery import install

TTL = 3.0


def write(*words: object) -> None:
    with Path(os.environ["JOURNAL"]).open("a") as file:
        file.write(" ".join(map(str, [time.time(), os.getpid(), *words])) + "\n")


def work(name: str, seconds: float, *words: object) -> None:
    write("begin", name, *words)
    time.sleep(seconds)
    write("end", name, *words)


def make_app(broker: str, store: str) -> Celery:
    """The app, as workers, beats and the tests make it."""
    app = Celery("program", broker=f"{broker}/0", backend=f"{broker}/1", set_as_current=False)
    if "REDELIVER" in os.environ:
        app.conf.broker_transport_options = {
            "visibility_timeout": 2,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
    app.conf.broker_connection_retry_on_startup = True
    app.conf.worker_prefetch_multiplier = 1
    app.conf.beat_max_loop_interval = 1
    app.conf.beat_schedule = {"tick": {"task": "tick", "schedule": schedule(1.0)}}
    if store:
        install(app, holdfast.connect(store, ttl=TTL))
    add_plain(app)
    add_serial(app)
    add_unique(app)
    add_once(app)
    return app


def add_plain(app: Celery) -> None:
    @app.task(shared=False, name="tick")
    def tick() -> None:
        write("tick")

    @app.task(shared=False, name="plain")
    def plain(account: str, seconds: float) -> None:
        work(account, seconds)

    @app.task(shared=False, name="late", acks_late=True)
    def late(key: str, seconds: float) -> None:
        work(key, seconds)


def add_serial(app: Celery) -> None:
    @app.task(shared=False, name="serial", bind=True, serial="account:{account}", max_retries=0)
    def serial(self: Any, account: str, seconds: float) -> int:
        token: int = self.lease.token if self.lease else 0
        work(account, seconds, token, self.request.retries)
        return token

    @app.task(shared=False, name="waits", serial="account:{account}", max_wait=1.0)
    def waits(account: str) -> None:
        work(account, 0)

    @app.task(shared=False, name="soft", serial="account:{account}", soft_time_limit=4)
    def soft(account: str) -> None:
        work(account, 60)

    @app.task(
        shared=False, name="hard", serial="account:{account}", unique="hard:{account}", time_limit=4
    )
    def hard(account: str, seconds: float) -> None:
        work(account, seconds)


def add_unique(app: Celery) -> None:
    @app.task(shared=False, name="until_start", unique="rebuild:{key}", until="start")
    def until_start(key: str, seconds: float) -> None:
        work(key, seconds)

    @app.task(shared=False, name="until_done", unique="rebuild:{key}")
    def until_done(key: str, seconds: float) -> None:
        work(key, seconds)

    @app.task(shared=False, name="retried", bind=True, unique="retry:{key}", max_retries=2)
    def retried(self: Any, key: str) -> str:
        work(key, 0.2, self.request.retries)
        if self.request.retries < 2:
            raise self.retry(countdown=1)
        return "done"


def add_once(app: Celery) -> None:
    @app.task(shared=False, name="once", bind=True, once="invoice:{number}")
    def once(self: Any, number: str, seconds: float) -> dict[str, str]:
        work(number, seconds)
        return {"by": self.request.id}

    @app.task(shared=False, name="fails_first", bind=True, once="fails:{number}", max_retries=1)
    def fails_first(self: Any, number: str) -> str:
        work(number, 0)
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return "second"

    @app.task(shared=False, name="late_once", acks_late=True, once=True)
    def late_once(key: str, seconds: float) -> None:
        work(key, seconds)


if "BROKER" in os.environ:
    app = make_app(os.environ["BROKER"], os.environ["HOLDFAST_URL"])
