"""What a worker records of its holds is true, also of those that are cut short."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.core import admit
from holdfast.core.contract import Renewal
from holdfast.errors import BackendUnavailable
from holdfast.stores.memory import MemoryBackend
from holdfast.testing import Flavour
from holdfast.testing.history import RecordedHold, faults, read_holds
from holdfast.testing.worker import Worker

TTL_SECONDS = 3.0


async def _never_renewed(*_: Any, **__: Any) -> Renewal:
    raise BackendUnavailable("renewals fail")


def _is_held(path: Path) -> bool:
    return path.exists() and b"held" in path.read_bytes()


async def _two_holds(path: Path) -> list[RecordedHold]:
    """The first hold lasts until its block is cancelled; the second is asked for meanwhile."""
    url = f"memory://{path.parent.name}"
    async with (
        holdfast.connect_async(url, ttl=TTL_SECONDS) as one,
        holdfast.connect_async(url, ttl=TTL_SECONDS) as other,
    ):

        async def contend(client: holdfast.AsyncLocks, process: str, hold: float) -> None:
            worker = Worker(client, Flavour.ASYNCIO)
            await worker.contend("name", 0.01, hold, str(path), process)

        first = asyncio.create_task(contend(one, "first", 20 * TTL_SECONDS))
        while not _is_held(path):  # noqa: ASYNC110 - the worker tells it to the file only
            await asyncio.sleep(0.01)
        await contend(other, "second", 0.001)
        await first
    return read_holds(path)


def test_a_cancelled_block_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is cancelled as doubtful releases before its certain end; the next holder does
    not overlap it."""
    monkeypatch.setattr(MemoryBackend, "renew", _never_renewed)
    first, second = asyncio.run(_two_holds(tmp_path / "history"))[:2]
    assert (first.process, second.process) == ("first", "second")
    assert first.ends < first.held + TTL_SECONDS
    assert faults([first, second]) == []


def test_an_overlap_with_a_block_that_is_cancelled_later_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryBackend, "renew", _never_renewed)
    monkeypatch.setattr(admit, "fits", lambda *_: True)
    assert any("while" in fault for fault in faults(asyncio.run(_two_holds(tmp_path / "history"))))
