"""Blocking work that a task waits for, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(work: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Runs blocking work on a thread of its own; a result that nobody waits for is undone.

    Not the loop's executor: that may be full of the program's own work, waiting for us.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            if error is None:
                undo(result)  # type: ignore[arg-type]
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as failure:  # noqa: BLE001 - it is raised on the loop
            error = failure
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop is closed
            if error is None:
                undo(result)  # type: ignore[arg-type]

    threading.Thread(target=run, name="holdfast-dial", daemon=True).start()
    return await future
