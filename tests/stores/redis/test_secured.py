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
from stores.redis.bench import blocking_and_asyncio, clients, listening, until

PASSWORD, OF_SENTINELS = "p@ss/w:rd", "an&ther"
TTL = 300.0
"""Much longer than a test: whoever waits for a hold to end is woken, or waits in vain."""
Store = Callable[[Servers], Any]


def sentinel(servers: Servers) -> SentinelTrio:
    """Master and sentinels have passwords of their own."""
    return servers.of(SentinelTrio, tls=True, password=PASSWORD, sentinel_password=OF_SENTINELS)


def cluster(servers: Servers) -> RedisCluster:
    return servers.of(RedisCluster, tls=True, password=PASSWORD)


def _somebody_listens(store: Any, namespace: str) -> bool:
    """In line for the name, and where a release can reach it."""
    for node in store.nodes:
        with suppress(RedisError):  # a sentinel, or a node that has other slots
            if isinstance(node, RedisServer) and listening(node, namespace):
                return True
    return False


# A trio takes a while to find together.
SLOW_SENTINEL = pytest.param(sentinel, marks=pytest.mark.faults)


@pytest.fixture
def only_woken(no_recheck: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the renewer look after those who wait: that wakes them, too."""
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
    ("store_of", "word", "instead", "told"),
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
def test_what_is_wrong_is_told_without_secrets(
    servers: Servers, flavour: Flavour, store_of: Store, word: str, instead: str, told: str
) -> None:
    """A store that nobody vouches for, and logins that are wrong or missing."""
    url = store_of(servers).url.replace(word, instead)

    async def main() -> None:
        async with clients(url, flavour) as (client,):
            with pytest.raises(BackendUnavailable, match=told) as caught:
                await client.lock("name", timeout=0).acquire()
        for secret in ("gu3ss", PASSWORD, OF_SENTINELS):
            assert secret not in str(caught.value)

    asyncio.run(main())
