"""A test's body over doors of either kind, written once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from holdfast.testing import Flavour
from holdfast.testing.doors import open_door
from holdfast.testing.workers import Workers
from stores.redis.bench import LONGEST_SECONDS

__all__ = ["through"]


def through(
    flavour: Flavour, body: Callable[..., Awaitable[None]], *urls: str, **options: Any
) -> None:
    """Runs a test's body with a door to each URL, all of them with the words of the asyncio one."""

    async def run() -> None:
        workers = Workers()
        try:
            async with asyncio.timeout(LONGEST_SECONDS), AsyncExitStack() as stack:
                doors = [open_door(url, flavour, workers.run, **options) for url in urls]
                for door in doors:
                    await stack.enter_async_context(door)
                await body(*doors)
        finally:
            workers.close()

    asyncio.run(run())
