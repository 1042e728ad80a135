"""The keeper lives among threads, and must not take a living task for one that has ended."""

from __future__ import annotations

import asyncio
import logging

import pytest

import holdfast


def test_a_living_task_keeps_its_block(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with (
            holdfast.connect_async("memory://tasks") as locks,
            locks.lock("a", ttl=0.3) as lease,
        ):
            await asyncio.sleep(0.5)  # several rounds of the keeper
            lease.check()

    with caplog.at_level(logging.WARNING, "holdfast"):
        asyncio.run(body())
    assert not caplog.records


def test_a_task_that_ended_in_its_block_is_released(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with holdfast.connect_async("memory://ended") as locks:
            abandoned = locks.lock("a", ttl=0.3)
            await asyncio.create_task(abandoned.__aenter__())
            async with locks.lock("a", timeout=5):
                pass

    with caplog.at_level(logging.WARNING, "holdfast"):
        asyncio.run(body())
    assert "ended inside the block" in caplog.text
