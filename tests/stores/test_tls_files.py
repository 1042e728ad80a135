"""A file for TLS that can't be read is told at once, with its path: it is no outage."""

from __future__ import annotations

import asyncio

import pytest

import holdfast
from holdfast.errors import BackendUnavailable

MISSING = "/nonexistent/ca.pem"
URLS = {
    "etcd": f"etcds://127.0.0.1:1?ca={MISSING}",
    "consul": f"consuls://127.0.0.1:1?ca={MISSING}",
    "mysql": f"mysql://user@127.0.0.1:1/db?ssl_ca={MISSING}",
    "zookeeper": f"zookeeper://127.0.0.1:1?ca={MISSING}",
}


def check(error: Exception) -> None:
    assert MISSING in str(error)
    assert not isinstance(error, BackendUnavailable) or error.final


@pytest.mark.parametrize("store", URLS)
def test_the_blocking_client(store: str) -> None:
    with (
        pytest.raises((BackendUnavailable, ValueError)) as caught,
        holdfast.connect(URLS[store]) as locks,
    ):
        locks.lock("name", timeout=20).acquire()
    check(caught.value)


@pytest.mark.parametrize("store", URLS)
def test_the_asyncio_client(store: str) -> None:
    async def take() -> None:
        async with holdfast.connect_async(URLS[store]) as locks:
            await locks.lock("name", timeout=20).acquire()

    with pytest.raises((BackendUnavailable, ValueError)) as caught:
        asyncio.run(take())
    check(caught.value)
