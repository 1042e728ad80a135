"""A process with a schedule, for test_apscheduler: `python apscheduler_program.py KIND WITH`.

KIND is `threads` or `asyncio`, WITH is `once`, `take-over` or `nothing`. It appends lines to the
file JOURNAL: of each run its begin and end, of each fire time what this process did.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import apscheduler.executors.base
import apscheduler.schedulers.base
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MISSED
from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.blocking import BlockingScheduler

import holdfast
from holdfast.integrations.apscheduler import Once

KIND, WITH = sys.argv[1:]
TTL = float(os.environ.get("TTL", "10"))
AHEAD = timedelta(seconds=float(os.environ.get("AHEAD", "0")))
WORK_SECONDS = float(os.environ.get("WORK", "0"))
JOBS = os.environ["JOBS"].split()


class Clock(datetime):
    """The clock of a host that is ahead of the others, as APScheduler sees it."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return datetime.now(tz) + AHEAD


for module in (apscheduler.schedulers.base, apscheduler.executors.base):
    module.datetime = Clock


def write(*words: object) -> None:
    with Path(os.environ["JOURNAL"]).open("a") as file:
        file.write(" ".join(map(str, [time.time(), os.getpid(), *words])) + "\n")


def work(job: str) -> set[int]:
    """The job: JSON can't hold its value."""
    write("begin", job)
    time.sleep(WORK_SECONDS)
    write("end", job)
    return {1}


async def work_async(job: str) -> set[int]:
    write("begin", job)
    await asyncio.sleep(WORK_SECONDS)
    write("end", job)
    return {1}


def tell(event: Any) -> None:
    due = event.scheduled_run_time.astimezone(UTC).isoformat()
    if event.code == EVENT_JOB_MISSED:
        write("missed", event.job_id, due)
    elif event.exception is not None:
        write("error", event.job_id, due, type(event.exception).__name__)
    else:
        write("ran" if event.retval == {1} else "skipped", event.job_id, due)


def executor() -> Any:
    url, take_over = os.environ["HOLDFAST_URL"], WITH == "take-over"
    if KIND == "asyncio":
        plain = AsyncIOExecutor()
        locks: Any = holdfast.connect_async(url)
    else:
        plain = ThreadPoolExecutor(10)
        locks = holdfast.connect(url)
    return plain if WITH == "nothing" else Once(plain, locks, take_over=take_over, ttl=TTL)


def prepare(scheduler: Any) -> None:
    options: dict[str, Any] = {"misfire_grace_time": 30, "coalesce": False}
    for job in JOBS:
        function = work_async if job == "coroutine" else work
        if job == "interval":
            scheduler.add_job(function, "interval", [job], seconds=1, id=job, **options)
        else:
            scheduler.add_job(function, "cron", [job], second="*", id=job, **options)
    scheduler.add_listener(tell, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR | EVENT_JOB_MISSED)
    write("started")


async def main() -> None:
    scheduler = AsyncIOScheduler(executors={"default": executor()})
    prepare(scheduler)
    scheduler.start()
    await asyncio.Event().wait()


if KIND == "asyncio":
    asyncio.run(main())
else:
    scheduler = BlockingScheduler(executors={"default": executor()})
    prepare(scheduler)
    scheduler.start()
