"""Sentinel and Cluster over TLS and with passwords, through the clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from holdfast.core import renewer
from holdfast.errors import BackendUnavailable
from holdfast.testing import Flavour
from servers.redis import RedisServer
from servers.redis_cluster import RedisCluster
from servers.redis_sentinel import SentinelTrio
from servers.registry import Servers
from servers.resp import RedisError
from stores.redis.helpers import blocking_and_asyncio, clients, listening, until

PASSWORD, OF_SENTINELS = "p@ss/w:rd", "an&ther"
TTL = 300.0
"""Much longer than a test: a waiter acquires only if it is woken."""
Store = Callable[[Servers], Any]


def sentinel(servers: Servers) -> SentinelTrio:
    """Master and sentinels have different passwords."""
    return servers.of(SentinelTrio, tls=True, password=PASSWORD, sentinel_password=OF_SENTINELS)


def cluster(servers: Servers) -> RedisCluster:
    return servers.of(RedisCluster, tls=True, password=PASSWORD)


def _somebody_listens(store: Any, namespace: str) -> bool:
    """True if a waiter is in the queue of the name and can be woken."""
    for node in store.nodes:
        with suppress(RedisError):  # a sentinel, or a node that owns other slots
            if isinstance(node, RedisServer) and listening(node, namespace):
                return True
    return False


# Three sentinels need some time to find each other.
SLOW_SENTINEL = pytest.param(sentinel, marks=pytest.mark.faults)


@pytest.fixture
def only_woken(no_recheck: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The renewer does not refresh waiters either: that would wake them, too."""
    monkeypatch.setattr(renewer, "REFRESH_SECONDS", TTL)


@pytest.mark.usefixtures("only_woken")
@pytest.mark.parametrize("store_of", [SLOW_SENTINEL, cluster])
@blocking_and_asyncio
def test_a_hold_and_a_wait_that_is_woken(
    servers: Servers, namespace: str, flavour: Flavour, store_of: Store
) -> None:
    store = store_of(servers)

    async def main() -> None:
        async with clients(store.url, flavour, 2, namespace=namespace, ttl=TTL) as (ours, theirs):
            lease = await ours.lock("name").acquire()
            coming = asyncio.create_task(theirs.lock("name").acquire())
            await until(lambda: _somebody_listens(store, namespace))
            await lease.extend()
            assert await lease.release() is True
            later = await coming
            assert later.token > lease.token
            assert await later.release() is True

    asyncio.run(main())


NOT_TRUSTED, NOT_LET_IN = "certificate verify failed", "invalid username-password pair"


@pytest.mark.parametrize(
    ("store_of", "word", "instead", "message"),
    [
        (sentinel, "ssl_ca_certs", "client_name", NOT_TRUSTED),
        (sentinel, "p%40ss", "gu3ss", NOT_LET_IN),
        (sentinel, "an%26ther", "gu3ss", NOT_LET_IN),
        (sentinel, "sentinel_password", "client_name", "refuses: NOAUTH"),
        (cluster, "ssl_ca_certs", "client_name", NOT_TRUSTED),
        (cluster, "p%40ss", "gu3ss", NOT_LET_IN),
    ],
)
@pytest.mark.faults
@blocking_and_asyncio
def test_errors_have_no_secrets(
    servers: Servers, flavour: Flavour, store_of: Store, word: str, instead: str, message: str
) -> None:
    """An unverified certificate, and wrong or missing logins."""
    url = store_of(servers).url.replace(word, instead)

    async def main() -> None:
        async with clients(url, flavour) as (client,):
            with pytest.raises(BackendUnavailable, match=message) as caught:
                await client.lock("name", timeout=3).acquire()
        for secret in ("gu3ss", PASSWORD, OF_SENTINELS):
            assert secret not in str(caught.value)

    asyncio.run(main())
