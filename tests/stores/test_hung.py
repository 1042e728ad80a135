"""A store that accepts connections and never answers: ``timeout`` bounds acquire and ``close``.
And one whose port is closed: the error says so in words."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import holdfast
from holdfast.claim import Busy, Grant
from holdfast.core.contract import Settings, Waiting
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.url import open_store
from servers.consul import ConsulServer
from servers.etcd import EtcdServer
from servers.process import Server
from servers.redis import RedisServer
from servers.zookeeper import ZooKeeperServer
from stores.claims import claim_of

TIMEOUTS = [0.0, 0.1, 1.0]
SPARE = 3.0
"""A second is promised, and two are to spare on a busy machine."""
URLS = [
    "redis://{}",
    "redlock://{},{},{}",
    "etcd://{}",
    "consul://{}",
    "zookeeper://{}/",
    "postgresql://user@{}/db",
    "postgresql://user@{}/db?mode=advisory",
    "mysql://user@{}/db",
    "mysql://user@{}/db?mode=advisory",
]
Run = Callable[[str, float, int], float]


def _blocking(url: str, timeout: float, number: int) -> float:
    holdfast.connect(url).close()  # so that imports are not measured
    began = time.monotonic()
    locks = holdfast.connect(url, ttl=10)
    for name in range(number):
        with pytest.raises(BackendUnavailable):
            locks.lock(f"name {name}", timeout=timeout).acquire()
    locks.close()
    return time.monotonic() - began


def _asyncio(url: str, timeout: float, number: int) -> float:
    async def main() -> None:
        locks = holdfast.connect_async(url, ttl=10)
        for name in range(number):
            with pytest.raises(BackendUnavailable):
                await locks.lock(f"name {name}", timeout=timeout).acquire()
        await locks.close()

    holdfast.connect(url).close()  # so that imports are not measured
    asyncio.run(holdfast.connect_async(url).close())
    began = time.monotonic()
    asyncio.run(main())
    return time.monotonic() - began


RUNS = pytest.mark.parametrize("run", [_blocking, _asyncio], ids=["blocking", "asyncio"])


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    with ExitStack() as stack:
        servers = [socket.create_server(("127.0.0.1", 0), backlog=100) for _ in range(3)]
        yield [f"127.0.0.1:{stack.enter_context(each).getsockname()[1]}" for each in servers]


@RUNS
@pytest.mark.parametrize("timeout", TIMEOUTS)
@pytest.mark.parametrize("url", URLS, ids=lambda url: url.replace("://", " ").split("{")[0])
def test_acquire_and_close_end_in_time(
    url: str, timeout: float, run: Run, addresses: list[str]
) -> None:
    took = run(url.format(*addresses), timeout, 1)
    assert timeout / 2 < took < timeout + SPARE


@pytest.mark.parametrize("url", URLS, ids=lambda url: url.replace("://", " ").split("{")[0])
def test_a_closed_port_is_told_in_words(url: str) -> None:
    """Without the number that the system has for the error."""
    with (
        holdfast.connect(url.format(*[f"127.0.0.1:{port}" for port in (1, 2, 3)])) as locks,
        pytest.raises(BackendUnavailable, match="Connection refused") as caught,
    ):
        locks.lock("name", timeout=0).acquire()
    assert "Errno" not in str(caught.value)


@pytest.mark.parametrize("kind", [ConsulServer, EtcdServer, ZooKeeperServer])
def test_a_renewal_without_an_answer_is_unknown(kind: type[Server]) -> None:
    """Of a waiting claim, too: else it would pass for an answer of the store, a very slow one."""
    with kind() as server:
        backend = open_store(server.url, Settings()).backend(BlockingRuntime())
        held, waiting = claim_of("name"), claim_of("name")
        grant = run_now(backend.attempt(held, join=True))
        assert isinstance(grant, Grant)
        assert isinstance(run_now(backend.attempt(waiting, join=True)), Busy)
        server.pause()
        for grants in ([grant], []):
            work = backend.renew(grants, [Waiting(waiting, 0)], until=now() + 0.5)
            owners = {each.claim.owner for each in grants} | {waiting.owner}
            assert run_now(work).unknown.keys() == owners
        server.resume()
        run_now(backend.close())


@RUNS
def test_a_stopped_redis_delays_close_once(run: Run) -> None:
    """However many claims have an unknown outcome."""
    with RedisServer() as server:
        with holdfast.connect(server.url) as locks, locks.lock("warm"):
            pass
        server.pause()
        try:
            # Each first request has most of a second at least.
            assert run(server.url, 0.25, 4) < 4 * 1.0 + SPARE
        finally:
            server.resume()
