"""A FastAPI application with jobs of a fleet; ``JOBS`` says which."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from fastapi import FastAPI

from holdfast.integrations.asgi import fleet, lifespan
from integrations.journal import Journal

INTERVAL = 1
LONG_INTERVAL = 24 * 3600
JOBS = os.environ["JOBS"].split(",")
TTL = float(os.environ.get("TTL", "3"))

journal = Journal(os.environ["JOURNAL"])


async def finish() -> None:
    """Waits for the word of the test, which is another process."""
    while not journal.read("finish"):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def sweep(lease: Any, due: datetime) -> None:
    """A job whose effect is one line."""
    journal.write("end", due=due.timestamp(), token=lease.token)


async def daily(lease: Any, due: datetime) -> None:
    """A job that goes on until the test lets it end."""
    journal.write("begin", due=due.timestamp(), token=lease.token)
    try:
        await finish()
    except asyncio.CancelledError:
        journal.write("cancelled", token=lease.token)
        raise
    journal.write("end", due=due.timestamp(), token=lease.token)


def in_a_thread(lease: Any, due: datetime) -> None:
    """The same as a ``def``, which can't be cancelled."""
    journal.write("begin", due=due.timestamp(), token=lease.token)
    while not journal.read("finish"):
        time.sleep(0.05)
    journal.write("end", due=due.timestamp(), token=lease.token, held=lease.held)


async def failing() -> None:
    journal.write("failing")
    raise ValueError("no orders today")


async def mailer(lease: Any) -> None:
    """The work of a leader."""
    journal.write("lead", token=lease.token)
    try:
        await asyncio.Event().wait()
    finally:
        journal.write("follow", token=lease.token)


async def warm() -> None:
    """Start-up work that is done once per release."""
    journal.write("begin")
    if os.environ.get("SLOW_START"):
        await finish()
    journal.write("end")


if "sweep" in JOBS:
    fleet.every(INTERVAL, missed="all")(sweep)
if "daily" in JOBS:
    fleet.every(LONG_INTERVAL)(daily)
if "thread" in JOBS:
    fleet.every(LONG_INTERVAL)(in_a_thread)
if "failing" in JOBS:
    fleet.every(INTERVAL)(failing)
if "leader" in JOBS:
    fleet.leader("mailer")(mailer)
if "warm" in JOBS:
    fleet.once_per_deploy("v7")(warm)


@asynccontextmanager
async def own(app: FastAPI) -> AsyncIterator[None]:
    """The application's own lifespan, beside ours."""
    journal.write("start", has_locks=hasattr(app.state, "locks"))
    yield
    journal.write("stop")


app = FastAPI(lifespan=lifespan(also=own, namespace=os.environ["NAMESPACE"], ttl=TTL))


@app.get("/")
async def root() -> int:
    journal.write("served")
    return os.getpid()
