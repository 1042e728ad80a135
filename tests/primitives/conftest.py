"""Jobs on every store that keeps records, through both clients; a body is written once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Guarantee
from holdfast.testing import Flavour, Harness
from holdfast.testing.clients import open_client
from holdfast.testing.guarantees import guarantees_of
from holdfast.testing.workers import Workers

if TYPE_CHECKING:
    from holdfast import AsyncLocks


class Bench:
    """Clients of one flavour to one running store, in a namespace of their own."""

    def __init__(self, harness: Harness, flavour: Flavour) -> None:
        self.harness, self.flavour = harness, flavour
        self.namespace = f"t{secrets.token_hex(6)}"
        self.workers = Workers()
        self._clients: list[AsyncLocks] = []

    def client(self, **options: Any) -> AsyncLocks:
        """Another client, as another process would open it."""
        options = {"namespace": self.namespace, "ttl": 10} | options
        client = open_client(self.harness.url, self.flavour, self.workers.run, **options)
        self._clients.append(client)
        return client

    def run(self, body: Callable[[], Awaitable[None]]) -> None:
        """Runs the body and closes the clients that it opened."""

        async def whole() -> None:
            try:
                async with asyncio.timeout(60):
                    await body()
            finally:
                for client in self._clients:
                    await client.close()
                self.workers.close()

        asyncio.run(whole())


@pytest.fixture(params=list(Flavour))
def bench(request: pytest.FixtureRequest, harness: Harness) -> Bench:
    if Guarantee.RECORDS not in guarantees_of(harness):
        pytest.skip(f"{harness.name} has no RECORDS")
    return Bench(harness, request.param)
