"""Sixteen processes and one lock, ten seconds: nobody overlaps, tokens grow, turns are fair.

How fair on a machine that is not overloaded, the benchmarks say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.redis_bench import blocking_and_asyncio
from harnesses.redlock import mark_as_new
from holdfast.testing import Flavour
from holdfast.testing.history import Hold, fairness, faults, read_holds
from holdfast.testing.processes import Process
from servers.ensemble import Ensemble
from servers.redis import RedisServer
from servers.registry import Servers

pytestmark = pytest.mark.faults

CROWD = 16
SECONDS = 10.0


@pytest.fixture
def masters() -> Iterator[str]:
    """Three independent masters, as a URL."""
    with Ensemble([RedisServer() for _ in range(3)]) as nodes:
        url = f"redlock://{nodes.hosts}"
        mark_as_new(url)
        yield url


async def _contend(url: str, flavour: Flavour, path: Path) -> tuple[list[Hold], list[str]]:
    crowd = [Process(url, flavour) for _ in range(CROWD)]
    try:
        await asyncio.gather(*(process.ask("check") for process in crowd))
        words = {"name": "name", "seconds": SECONDS, "hold": 0.001, "history": str(path)}
        await asyncio.gather(*(p.ask("contend", process=p.name, **words) for p in crowd))
    finally:
        for process in crowd:
            process.close()
    return read_holds(path), [process.name for process in crowd]


@blocking_and_asyncio
def test_sixteen_processes_take_turns(servers: Servers, tmp_path: Path, flavour: Flavour) -> None:
    """First come, first served: nobody is left behind, also on a machine that is overloaded."""
    url = servers.of(RedisServer).url
    holds, processes = asyncio.run(_contend(url, flavour, tmp_path / "history"))
    assert faults(holds) == []
    assert fairness(holds, processes) >= 0.8


@blocking_and_asyncio
def test_sixteen_processes_on_a_majority(masters: str, tmp_path: Path, flavour: Flavour) -> None:
    """Without a line, all are served all the same."""
    holds, processes = asyncio.run(_contend(masters, flavour, tmp_path / "history"))
    assert faults(holds) == []
    assert {hold.process for hold in holds} == set(processes)
