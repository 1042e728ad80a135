"""Runs one test body with blocking or asyncio clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from holdfast.testing import Flavour
from holdfast.testing.clients import open_client
from holdfast.testing.workers import Workers
from stores.redis.helpers import LONGEST_SECONDS

__all__ = ["run_with_clients"]


def run_with_clients(
    flavour: Flavour, body: Callable[..., Awaitable[None]], *urls: str, **options: Any
) -> None:
    """Run a test body with a client for each URL. Blocking clients are wrapped: every
    client has the methods of the asyncio one."""

    async def run() -> None:
        workers = Workers()
        try:
            async with asyncio.timeout(LONGEST_SECONDS), AsyncExitStack() as stack:
                clients = [open_client(url, flavour, workers.run, **options) for url in urls]
                for client in clients:
                    await stack.enter_async_context(client)
                await body(*clients)
        finally:
            workers.close()

    asyncio.run(run())
