"""The masters of a Redlock store, each behind a proxy, and doors of either kind to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from backends.redis_bench import LONGEST_SECONDS
from harnesses.redlock import mark_as_new
from holdfast.testing import Flavour
from holdfast.testing.doors import open_door
from holdfast.testing.workers import Workers
from servers.ensemble import Ensemble
from servers.proxy import Proxy
from servers.redis import RedisServer

__all__ = ["KEY", "Nodes", "five", "held_by", "three", "through"]

KEY = "holdfast:redlock:{name}"


class Nodes(Ensemble[RedisServer]):
    """Masters that keep nothing, each behind a proxy, marked as new."""

    def __init__(self, count: int) -> None:
        super().__init__([RedisServer() for _ in range(count)])
        self.proxies: list[Proxy] = []

    def wait_ready(self) -> None:
        super().wait_ready()
        self.proxies = [Proxy(node) for node in self.nodes]
        mark_as_new(self.url)

    @property
    def url(self) -> str:
        return f"redlock://{self.hosts}?max_ttl=300"

    @property
    def proxied_url(self) -> str:
        hosts = (f"{proxy.server.host}:{proxy.port}" for proxy in self.proxies)
        return f"redlock://{','.join(hosts)}?max_ttl=300"

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        super().close()


@pytest.fixture
def three() -> Iterator[Nodes]:
    """Three masters."""
    with Nodes(3) as nodes:
        yield nodes


@pytest.fixture
def five() -> Iterator[Nodes]:
    """Five masters."""
    with Nodes(5) as nodes:
        yield nodes


def held_by(node: RedisServer) -> bool:
    """Whether a node knows of an exclusive hold of the name."""
    return node.ask("HEXISTS", KEY, "x") == 1


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
