"""One asyncio client on several event loops, one after the other, of asyncio and of uvloop."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from harnesses.redlock import mark_as_new
from servers.ensemble import Ensemble
from servers.redis import RedisServer

LOOPS = 10
LONGEST_SECONDS = 30.0

NewLoop = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture(scope="module")
def masters() -> Iterator[Ensemble[RedisServer]]:
    """Three servers: the first is the store ``redis``, all of them are the store ``redlock``."""
    with Ensemble([RedisServer() for _ in range(3)]) as nodes:
        mark_as_new(f"redlock://{nodes.hosts}")
        yield nodes


@pytest.fixture(params=["redis", "redlock"])
def url(request: pytest.FixtureRequest, masters: Ensemble[RedisServer]) -> str:
    return masters.nodes[0].url if request.param == "redis" else f"redlock://{masters.hosts}"


@pytest.fixture(params=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> NewLoop:
    if request.param == "asyncio":
        return asyncio.new_event_loop
    factory: NewLoop = pytest.importorskip("uvloop").new_event_loop
    return factory


def _run(new_loop: NewLoop, work: Any) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work)


async def _use(locks: holdfast.AsyncLocks) -> None:
    """One wait and two holds: all kinds of connections are open afterwards."""
    async with locks.lock("name", ttl=10):
        waiting = asyncio.create_task(locks.lock("name", timeout=LONGEST_SECONDS).acquire())
        await asyncio.sleep(0.05)
    lease = await waiting
    assert lease is not None
    assert await lease.release()


def _open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_loop_leaves_no_socket(url: str, new_loop: NewLoop) -> None:
    locks = holdfast.connect_async(url)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _run(new_loop, _use(locks))
        first = _open_files()
        for _ in range(LOOPS):
            _run(new_loop, _use(locks))
        assert _open_files() < first + LOOPS // 2
    _run(new_loop, locks.close())


def test_a_later_loop_closes_the_client(url: str, new_loop: NewLoop) -> None:
    locks = holdfast.connect_async(url)
    _run(new_loop, _use(locks))
    _run(new_loop, locks.close())


def test_a_loop_that_is_closed_abruptly_is_followed_by_another(url: str) -> None:
    """Without ``shutdown_asyncgens``, nothing closes the connections of the first loop."""
    new_loop: NewLoop = asyncio.new_event_loop
    locks = holdfast.connect_async(url)
    loop = new_loop()
    loop.run_until_complete(_use(locks))
    loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # asyncio's own, of the lost transports
        _run(new_loop, _use(locks))
        gc.collect()
    _run(new_loop, locks.close())
