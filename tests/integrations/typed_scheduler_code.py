"""Code of users of Celery and APScheduler, for the type checkers only."""

from __future__ import annotations

from typing import Any, assert_type

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.executors.pool import ThreadPoolExecutor
from celery import Celery

import holdfast
from holdfast import Lease, Locks, Outcome
from holdfast.integrations.apscheduler import Once
from holdfast.integrations.celery import Task, install

app = Celery("shop", broker="memory://")
locks = install(app, "memory://", beat="celery.beat:PersistentScheduler")
assert_type(locks, Locks)


@app.task(serial="account:{account_id}", max_wait=600)
def book(account_id: int, amount: int) -> int:
    return amount


@app.task(bind=True, base=Task, unique="rebuild:{user_id}", until="start")
def rebuild(self: Task, user_id: int) -> None:
    assert_type(self.lease, Lease | None)
    assert_type(self.locks, Locks)


@app.task(once="invoice:{number}", keep=3600, acks_late=True)
def send_invoice(number: str) -> dict[str, Any]:
    return {"number": number}


book.delay(42, 10)
rebuild.apply_async((7,), countdown=3)
executors = {
    "default": Once(ThreadPoolExecutor(10), locks, take_over=True, ttl=10),
    "asyncio": Once(AsyncIOExecutor(), holdfast.connect_async("memory://"), keep=3600),
}
assert_type(locks.once("invoice:42").outcome(), Outcome | None)
assert_type(locks.once("invoice:42").forget(token=7), bool)
