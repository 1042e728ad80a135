"""A store that hangs: an acquire with a timeout of one second ends in about that time, on every
kind of deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import holdfast
from harnesses.redlock import mark_as_new
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.testing.stalls import Stalls
from servers.ensemble import Ensemble
from servers.redis import RedisServer
from servers.redis_cluster import RedisCluster
from servers.redis_sentinel import SentinelTrio
from stores.signals import signals

LESS_THAN_A_REQUEST_SECONDS = 4.0
"""A request may take five seconds. Time in which the machine stood still is not counted."""

SEVERAL_REQUESTS_SECONDS = 20.0


class Several(Ensemble[RedisServer]):
    """One or more servers, under a URL."""

    def __init__(self, count: int, url: str) -> None:
        super().__init__([RedisServer() for _ in range(count)])
        self.url = url.format(self.hosts)

    def wait_ready(self) -> None:
        super().wait_ready()
        if self.url.startswith("redlock"):
            mark_as_new(self.url)


class Followed(Ensemble[RedisServer]):
    """A master whose replica must have every grant."""

    def __init__(self) -> None:
        master = RedisServer()
        super().__init__([master, RedisServer(replica_of=master)])
        self.url = f"{master.url}?replicas=1"

    def wait_ready(self) -> None:
        super().wait_ready()
        self.nodes[1].wait_linked()


Store = Several | Followed | SentinelTrio | RedisCluster


def _start(kind: str) -> Store:
    if kind == "sentinel":
        return SentinelTrio(replicas=0)
    if kind == "cluster":
        return RedisCluster()
    if kind == "replicas":
        return Followed()
    return Several(5, "redlock://{}") if kind == "redlock" else Several(1, "redis://{}")


STORES = [
    "single",
    "redlock",
    *(pytest.param(kind, marks=pytest.mark.faults) for kind in ("replicas", "sentinel", "cluster")),
]


@pytest.fixture(scope="module", params=STORES)
def running(request: pytest.FixtureRequest) -> Iterator[Store]:
    with _start(request.param) as servers:
        yield servers


@pytest.fixture
def store(running: Store) -> Iterator[Store]:
    """Servers that may be stopped."""
    yield running
    running.resume()
    running.wait_ready()


@pytest.mark.parametrize("warm", [True, False])
def test_an_acquire_ends_with_its_timeout(store: Store, warm: bool) -> None:
    """Over open connections, and over connections that must be opened first."""
    with holdfast.connect(store.url) as locks:
        if warm:
            with locks.lock("before"):
                pass
        store.pause()
        began = now()
        with Stalls() as stalls, pytest.raises(BackendUnavailable):
            locks.lock("name").acquire(timeout=1)
        took = now() - began - stalls.seconds
        store.resume()
    assert took < LESS_THAN_A_REQUEST_SECONDS


def test_signals_do_not_prolong_a_request(store: Store) -> None:
    """Neither a request with a deadline of its own, nor one with the usual timeout."""
    with holdfast.connect(store.url, patience=1) as locks:
        lease = locks.lock("held").acquire()
        assert lease is not None
        store.pause()
        with signals():
            began = now()
            with Stalls() as stalls:
                assert not lease.release()
            assert now() - began - stalls.seconds < SEVERAL_REQUESTS_SECONDS
            began = now()
            with Stalls() as stalls, pytest.raises(BackendUnavailable):
                locks.lock("name").acquire(timeout=1)
            assert now() - began - stalls.seconds < LESS_THAN_A_REQUEST_SECONDS
        store.resume()


@pytest.mark.parametrize("warm", [True, False])
def test_an_acquire_ends_with_its_timeout_async(store: Store, warm: bool) -> None:
    """The same through the asyncio client."""

    async def main() -> float:
        async with holdfast.connect_async(store.url) as locks:
            if warm:
                async with locks.lock("before"):
                    pass
            store.pause()
            began = now()
            with Stalls() as stalls, pytest.raises(BackendUnavailable):
                await locks.lock("name").acquire(timeout=1)
            took = now() - began - stalls.seconds
            store.resume()
            return took

    assert asyncio.run(main()) < LESS_THAN_A_REQUEST_SECONDS
