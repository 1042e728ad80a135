"""Sixteen processes contend for one lock for ten seconds: no overlap, growing tokens, fairness."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from harnesses.redlock import mark_as_new
from holdfast.testing import Flavour
from holdfast.testing.history import RecordedHold, faults, overtaken
from scale.processes import contend
from servers.ensemble import Ensemble
from servers.redis import RedisServer
from servers.registry import Servers
from stores.redis.helpers import blocking_and_asyncio

pytestmark = pytest.mark.faults


@pytest.fixture
def masters() -> Iterator[str]:
    """Three independent masters, as a URL."""
    with Ensemble([RedisServer() for _ in range(3)]) as nodes:
        url = f"redlock://{nodes.hosts}"
        mark_as_new(url)
        yield url


def _tokens(holds: list[RecordedHold]) -> list[int]:
    """In the order in which the holds began."""
    return [hold.token for hold in sorted(holds, key=lambda hold: hold.held)]


@blocking_and_asyncio
def test_sixteen_processes_are_served_in_order(
    servers: Servers, tmp_path: Path, flavour: Flavour
) -> None:
    """In order of arrival, also on an overloaded machine."""
    url = servers.of(RedisServer).url
    holds, processes = asyncio.run(contend(url, flavour, tmp_path / "history"))
    assert faults(holds) == []
    assert _tokens(holds) == sorted(set(_tokens(holds)))
    assert {hold.process for hold in holds} == set(processes)
    assert overtaken(holds) <= 0.05


@blocking_and_asyncio
def test_sixteen_processes_on_a_majority(masters: str, tmp_path: Path, flavour: Flavour) -> None:
    """Redlock has no queue, but every process is served."""
    holds, processes = asyncio.run(contend(masters, flavour, tmp_path / "history"))
    assert faults(holds) == []
    assert _tokens(holds) == sorted(set(_tokens(holds)))
    assert {hold.process for hold in holds} == set(processes)
