"""A Litestar application: a job of a fleet, and a handler that takes a lock."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

from litestar import Litestar, Request, Response, get

from holdfast import HoldfastError
from holdfast.integrations.asgi import fleet, lifespan
from holdfast.integrations.problem import problem_of
from integrations.journal import Journal

journal = Journal(os.environ["JOURNAL"])


@fleet.every(1)
async def sweep(lease: Any, due: datetime) -> None:
    journal.write("end", due=due.timestamp(), token=lease.token)


@get("/")
async def root() -> str:
    return "here"


@get("/orders/{order_id:int}")
async def order(request: Request[Any, Any, Any], order_id: int) -> str:
    async with request.app.state.locks.lock(f"order:{order_id}", timeout=1) as lease:
        return str(lease.token)


def refused(request: Request[Any, Any, Any], error: HoldfastError) -> Response[bytes]:
    problem = problem_of(error)
    if problem is None:
        raise error
    return Response(problem.body, status_code=problem.status, headers=problem.headers)


app = Litestar(
    [root, order],
    lifespan=[lifespan(namespace=os.environ["NAMESPACE"], ttl=3)],
    exception_handlers={HoldfastError: refused},
)
