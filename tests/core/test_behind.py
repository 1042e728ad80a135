"""The entry of a waiter tells how many wait behind it, soon after that has changed."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

import pytest

import holdfast


@pytest.mark.parametrize("waiters", [10, 100])
def test_the_number_behind_a_waiter_is_told_soon_and_cheaply(
    waiters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.core.renewer.REFRESH_SECONDS", 600.0)
    url = f"memory://{uuid4().hex}"
    sent: list[int] = []

    async def behind(locks: holdfast.AsyncLocks) -> int:
        info = await locks.inspect("name")
        return info.waiters[0].behind if info.waiters else -1

    async def main() -> None:
        async with holdfast.connect_async(url) as other, holdfast.connect_async(url) as locks:
            backend = locks._engine.renewer.backend
            renew = backend.renew

            async def counted(grants: Any, waits: Any, **how: Any) -> Any:
                sent.append(len(waits))
                return await renew(grants, waits, **how)

            monkeypatch.setattr(backend, "renew", counted)
            async with other.lock("name"):
                began = time.monotonic()
                waits = [asyncio.create_task(locks.lock("name").acquire()) for _ in range(waiters)]
                while await behind(other) != waiters - 1:
                    assert time.monotonic() - began < 10
                    await asyncio.sleep(0.05)
                for task in waits[waiters // 2 :]:
                    task.cancel()
                began = time.monotonic()
                while await behind(other) != waiters // 2 - 1:
                    assert time.monotonic() - began < 10
                    await asyncio.sleep(0.05)
                for task in waits:
                    task.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    started = time.monotonic()
    asyncio.run(main())
    assert sum(sent) <= len(sent) <= time.monotonic() - started + 2, sent
