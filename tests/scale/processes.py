"""Sixteen processes that contend for one lock for ten seconds."""

from __future__ import annotations

import asyncio
from pathlib import Path

from holdfast.testing import Flavour
from holdfast.testing.history import RecordedHold, read_holds
from holdfast.testing.processes import Process

__all__ = ["CROWD", "contend"]

CROWD = 16
SECONDS = 10.0


async def contend(url: str, flavour: Flavour, path: Path) -> tuple[list[RecordedHold], list[str]]:
    """The holds, as each process recorded them, and the names of all processes."""
    crowd = [Process(url, flavour) for _ in range(CROWD)]
    try:
        await asyncio.gather(*(process.ask("check") for process in crowd))
        words = {"name": "name", "seconds": SECONDS, "hold": 0.001, "history": str(path)}
        await asyncio.gather(*(p.ask("contend", process=p.name, **words) for p in crowd))
    finally:
        for process in crowd:
            process.close()
    return read_holds(path), [process.name for process in crowd]
