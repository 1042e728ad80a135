"""One hold, to see what a contender needs; it fails where the contender does."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from holdfast.bench.contender import Book
from holdfast.bench.jobs import find, read_target

__all__ = ["rehearse"]


def rehearse(book: Book, key: str, target: list[Any]) -> None:
    (contender,), aim = find(book, [key]), read_target(target)
    name = f"rehearsed:{os.getpid()}"
    opened: Any = contender.open
    if contender.flavour == "blocking":
        pair = opened(aim).lock(name)
        pair.acquire()
        pair.release()
        return

    async def hold() -> None:
        pair = (await opened(aim)).lock(name)
        await pair.acquire()
        await pair.release()

    asyncio.Runner().run(hold())  # not closed: the process ends
