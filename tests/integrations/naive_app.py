"""What people write first: a task in the lifespan, which then runs in every worker."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from integrations.journal import Journal

INTERVAL = 1

journal = Journal(os.environ["JOURNAL"])


async def sweep() -> None:
    due = int(time.time())
    while True:
        due += INTERVAL
        await asyncio.sleep(max(0, due - time.time()))
        journal.write("end", due=due)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    task = asyncio.create_task(sweep())
    yield
    task.cancel()


app = FastAPI(lifespan=lifespan)


@app.get("/")
async def root() -> int:
    return os.getpid()
