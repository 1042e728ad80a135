"""The renewer runs on a thread, and must not mistake a live task for an ended one."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import holdfast

ROUNDS = 3


async def _rounds(renewer: Any) -> None:
    """Returns after some rounds of the renewer."""
    renew, count = renewer.backend.renew, 0

    async def counted(*args: Any, **words: Any) -> Any:
        nonlocal count
        count += 1
        return await renew(*args, **words)

    renewer.backend.renew = counted
    async with asyncio.timeout(60):
        while count < ROUNDS:
            for hold in renewer.holds.values():
                hold.renew_at = 0.0  # as if a third of the ttl had passed
            renewer.plan(0.0)
            await asyncio.sleep(0.02)


def test_a_living_task_keeps_its_block(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with (
            holdfast.connect_async("memory://tasks") as locks,
            locks.lock("a", ttl=30) as lease,
        ):
            await _rounds(locks._renewer_thread.renewer)
            lease.check()

    with caplog.at_level(logging.WARNING, "holdfast"):
        asyncio.run(body())
    assert not caplog.records


def test_a_task_that_ended_in_its_block_is_released(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with holdfast.connect_async("memory://ended") as locks:
            abandoned = locks.lock("a", ttl=0.3)
            await asyncio.create_task(abandoned.__aenter__())
            async with locks.lock("a", timeout=60):
                pass

    with caplog.at_level(logging.WARNING, "holdfast"):
        asyncio.run(body())
    assert "ended inside the block" in caplog.text
