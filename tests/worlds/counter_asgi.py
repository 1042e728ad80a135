"""An ASGI application for uvicorn: each request adds one to a number in a file, under a lock."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import holdfast

__all__ = ["app"]

locks: holdfast.AsyncLocks


async def app(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    if scope["type"] == "lifespan":
        await _live(receive, send)
        return
    number = await _add_one(Path(os.environ["COUNTER"]))
    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    body = json.dumps({"number": number, "worker": os.getpid(), "world": loop}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def _live(
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    global locks
    async with holdfast.connect_async() as locks:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def _add_one(counter: Path) -> int:
    """Not atomic: two at once would lose one."""
    async with locks.lock("counter"):
        number = int(counter.read_text()) + 1  # noqa: ASYNC240 - a small local file
        await asyncio.sleep(0.001)
        counter.write_text(str(number))  # noqa: ASYNC240
    return number
