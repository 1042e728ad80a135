"""The payment service as a FastAPI application."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from holdfast import fencing
from holdfast.integrations.asgi import LockErrors, lifespan
from holdfast.integrations.idempotency import AsgiIdempotency
from integrations.payments import journal, pay

PROTECTED = os.environ.get("PROTECTED", "1") == "1"


def caller(scope: Mapping[str, Any]) -> str | None:
    found = dict(scope["headers"]).get(b"authorization")
    return None if found is None else str(found, "latin-1")


def required(scope: Mapping[str, Any]) -> bool:
    return bool(scope["path"] == "/required")


app = FastAPI(lifespan=lifespan(namespace=os.environ["NAMESPACE"], ttl=3, patience=2))
if PROTECTED:
    outage: Any = os.environ.get("ON_OUTAGE", "refuse")
    app.add_middleware(AsgiIdempotency, caller=caller, required=required, on_outage=outage)
    app.add_middleware(LockErrors)


@app.get("/")
async def root() -> int:
    return os.getpid()


@app.post("/background")
async def background(request: Request) -> Response:
    async def later() -> None:
        await run_in_threadpool(pay, "slow", b"", None)
        journal.write("later")

    journal.write("background")
    return Response("at once", background=BackgroundTask(later))


@app.post("/stream")
async def stream(request: Request) -> StreamingResponse:
    journal.write("stream")
    return StreamingResponse(iter(["one,", "two"]))


@app.post("/{what}")
@app.patch("/{what}")
async def do(what: str, request: Request) -> Response:
    fence = fencing.http.fence_of(request) if PROTECTED else None
    answer = await run_in_threadpool(pay, what, await request.body(), fence)
    response = Response(answer.body, answer.status)
    for name, value in answer.headers:
        response.headers.append(name, value)
    return response
