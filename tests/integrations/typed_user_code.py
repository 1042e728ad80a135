"""Code of users, for the type checkers only: decorators keep the types of what they decorate."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated, Any, assert_type

from fastapi import FastAPI
from litestar import Litestar
from starlette.applications import Starlette
from starlette.middleware import Middleware

import holdfast
from holdfast import AsyncLease, Outcome
from holdfast.integrations.asgi import Fleet, LockErrors, fleet, lifespan
from holdfast.integrations.fastapi import locked
from holdfast.integrations.idempotency import AsgiIdempotency, WsgiIdempotency


@asynccontextmanager
async def own(app: FastAPI) -> AsyncIterator[dict[str, int]]:
    yield {"answer": 42}


jobs = Fleet()
app = FastAPI(lifespan=lifespan("memory://", also=own, fleet=jobs, ttl=20))
app.add_middleware(AsgiIdempotency, caller=lambda scope: str(scope["user"]), keep=60)
app.add_middleware(LockErrors)
small = Starlette(lifespan=lifespan(), middleware=[Middleware(LockErrors)])
other = Litestar(lifespan=[lifespan("memory://")])


@fleet.every(60, missed="skip")
async def sweep(due: datetime) -> int:
    return due.hour


@fleet.leader("mailer", ttl=10)
async def consume(lease: AsyncLease) -> None: ...


@fleet.once_per_deploy("v7", timeout=30)
def warm() -> str:
    return "warm"


assert_type(warm(), str)
kept: Callable[[datetime], Coroutine[Any, Any, int]] = sweep


@app.post("/orders/{order_id}/pay")
async def pay(order_id: int, lease: Annotated[AsyncLease, locked("order:{order_id}")]) -> int:
    return assert_type(lease.token, int)


def service(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    return []


with holdfast.connect("memory://") as locks:
    wsgi = WsgiIdempotency(service, locks, caller=lambda environ: environ["REMOTE_USER"])
    outcome = locks.once("prices", keep=60, stale_for=3600).run(warm)
    assert_type(outcome, Outcome)
    assert_type(outcome.stale, bool)
