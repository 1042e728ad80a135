"""A loop that can't watch sockets, as the default one of Windows: refused, with what to do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import holdfast
from harnesses import harness_classes
from holdfast.testing import Harness


def _lacks(*_: object) -> None:
    raise NotImplementedError


lacks: Any = _lacks


class WindowsLoop(asyncio.SelectorEventLoop):
    """Has what ``ProactorEventLoop`` has."""

    add_reader = remove_reader = add_writer = remove_writer = lacks


STORES = [
    name
    for name in ("redis", "postgres", "postgres-advisory", "mysql", "mysql-advisory")
    if name in harness_classes()
]


@pytest.mark.parametrize("harness", STORES, indirect=True)
def test_a_loop_without_readers_is_refused_by_name(harness: Harness) -> None:
    async def acquire() -> None:
        async with (
            holdfast.connect_async(harness.url, patience=60) as locks,
            asyncio.timeout(30),
            locks.lock("name"),
        ):
            pass

    with (
        asyncio.Runner(loop_factory=WindowsLoop) as runner,
        pytest.raises(holdfast.BackendUnavailable) as caught,
    ):
        runner.run(acquire())
    assert caught.value.final
    assert "WindowsLoop" in str(caught.value)
    assert "loop_factory=asyncio.SelectorEventLoop" in str(caught.value)
