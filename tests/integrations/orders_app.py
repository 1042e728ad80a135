"""A FastAPI application whose requests hold locks, and the same without them."""

from __future__ import annotations

import asyncio
import functools
import os
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query
from pydantic import AliasChoices
from starlette.requests import HTTPConnection
from starlette.responses import StreamingResponse

from holdfast import AsyncLease, fencing
from holdfast.integrations.asgi import LockErrors, lifespan
from holdfast.integrations.fastapi import locked
from integrations.journal import Journal

journal = Journal(os.environ["JOURNAL"])
FOLDER = Path(os.environ["JOURNAL"]).parent

app = FastAPI(lifespan=lifespan(namespace=os.environ["NAMESPACE"], ttl=3, patience=2))
app.add_middleware(LockErrors)


@app.get("/")
async def root() -> int:
    return os.getpid()


async def add_one(path: Path) -> int:
    """Not atomic: two at once lose one."""
    text = path.read_text() if path.exists() else ""  # noqa: ASYNC240 - a small file
    number = int(text or "0") + 1
    await asyncio.sleep(0.01)
    path.write_text(str(number))  # noqa: ASYNC240
    return number


@app.post("/unlocked/{order_id}/add")
async def add_unlocked(order_id: int) -> int:
    return await add_one(FOLDER / f"unlocked-{order_id}")


@app.post("/orders/{order_id}/add")
async def add(
    order_id: int, lease: Annotated[AsyncLease, locked("order:{order_id}", timeout=60)]
) -> int:
    return await add_one(FOLDER / f"order-{order_id}")


@app.get("/orders/{order_id}/lease")
async def show(
    order_id: int, lease: Annotated[AsyncLease, locked("order:{order_id}")]
) -> dict[str, Any]:
    return {"name": lease.name, "held": lease.held}


@app.get("/def/{order_id}")
def show_def(order_id: str, lease: Annotated[AsyncLease, locked("def:{order_id}")]) -> str:
    assert lease.held
    return lease.name


@app.get("/search")
async def search(order_id: int, lease: Annotated[AsyncLease, locked("order:{order_id}")]) -> str:
    return lease.name


@app.get("/report")
async def report(
    lease: Annotated[AsyncLease, locked("report:{kind}:{part}")],
    kind: Annotated[str, Query(max_length=9)] = "daily",
    part: int = Query(1),
) -> str:
    return lease.name


@app.get("/renamed")
async def renamed(
    lease: Annotated[AsyncLease, locked("report:{kind}")],
    kind: Annotated[str, Query(alias="k")] = "daily",
) -> str:
    return lease.name


@app.get("/chosen")
async def chosen(
    lease: Annotated[AsyncLease, locked("report:{kind}")],
    kind: Annotated[str, Query(validation_alias=AliasChoices("k", "sort"))] = "daily",
) -> str:
    return lease.name


@app.get("/by-header")
async def by_a_header(
    lease: Annotated[AsyncLease, locked("report:{kind}")],
    kind: Annotated[str, Header()] = "daily",
) -> str:
    return lease.name


class Shown:
    """An endpoint that is an object."""

    async def __call__(
        self, order_id: int, lease: Annotated[AsyncLease, locked("order:{order_id}")]
    ) -> str:
        return lease.name


app.get("/object/{order_id}")(Shown())
app.get("/partial/{order_id}")(functools.partial(show_def))


def by_header(request: HTTPConnection) -> str:
    return f"tenant:{request.headers['x-tenant']}"


@app.get("/tenant")
async def tenant(lease: Annotated[AsyncLease, locked(by_header)]) -> str:
    return lease.name


@app.post("/orders/{order_id}/wait")
async def wait(order_id: int, lease: Annotated[AsyncLease, locked("order:{order_id}")]) -> int:
    """Holds the lock until the test says otherwise."""
    journal.write("hold", token=lease.token)
    try:
        while not journal.read("finish"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        journal.write("cancelled", token=lease.token)
        raise
    return lease.token


@app.post("/orders/{order_id}/guarded")
async def guarded(order_id: int, lease: Annotated[AsyncLease, locked("order:{order_id}")]) -> str:
    connection = sqlite3.connect(FOLDER / "orders.db")
    try:
        with connection:
            fencing.sql.guard(connection, lease.name, lease)
    finally:
        connection.close()
    return "written"


@app.get("/orders/{order_id}/stream")
async def stream(
    order_id: int,
    lease: Annotated[AsyncLease, locked("order:{order_id}", scope="request")],
) -> StreamingResponse:
    async def pieces() -> AsyncIterator[str]:
        for _ in range(3):
            await asyncio.sleep(0.01)
            yield f"{lease.held};"

    return StreamingResponse(pieces())


@app.post("/own/{order_id}")
async def own(order_id: int) -> str:
    """A handler that takes its lock itself."""
    async with app.state.locks.lock(f"order:{order_id}", timeout=1) as lease:
        name: str = lease.name
    return name
