"""A Starlette application: a job of a fleet, and a handler that takes a lock."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from holdfast.integrations.asgi import LockErrors, fleet, lifespan
from integrations.journal import Journal

journal = Journal(os.environ["JOURNAL"])


@fleet.every(1)
async def sweep(lease: Any, due: datetime) -> None:
    journal.write("end", due=due.timestamp(), token=lease.token)


async def root(request: Request) -> PlainTextResponse:
    return PlainTextResponse("here")


async def order(request: Request) -> PlainTextResponse:
    name = f"order:{request.path_params['order_id']}"
    async with request.app.state.locks.lock(name, timeout=1) as lease:
        return PlainTextResponse(str(lease.token))


app = Starlette(
    routes=[Route("/", root), Route("/orders/{order_id:int}", order)],
    lifespan=lifespan(namespace=os.environ["NAMESPACE"], ttl=3),
    middleware=[Middleware(LockErrors)],
)
