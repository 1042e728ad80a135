"""Helpers for the Redlock tests: masters, each behind a fault proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harnesses.redlock import mark_as_new
from servers.ensemble import Ensemble
from servers.proxy import Proxy
from servers.redis import RedisServer

__all__ = ["KEY", "Nodes", "five", "held_by", "three"]

KEY = "holdfast:redlock:{name}"


class Nodes(Ensemble[RedisServer]):
    """Masters without persistence, each behind a proxy, marked as new."""

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
    """Whether a node has an exclusive hold of the name."""
    return node.ask("HEXISTS", KEY, "x") == 1
