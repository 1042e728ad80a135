"""How cost grows: with waiters in a line, with names that are used. (``held`` grows by itself.)"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from holdfast.bench.contender import Book, Contender, Target
from holdfast.bench.drain import drain_job
from holdfast.bench.jobs import find, read_target

__all__ = ["growth_job"]

WINDOW = 0.5


def growth_job(book: Book, contender: str, target: list[Any], what: str, size: int) -> Any:
    """One point of a plot."""
    if what == "waiters":
        settle = 1.0 + size / 2000
        return drain_job(book, contender, target, size, settle, WINDOW, 60.0)
    (found,), aim = find(book, [contender]), read_target(target)
    counter = book.request_counter(found.store, aim.url)
    if found.flavour == "blocking":
        return _names(found, aim, counter, size)
    with asyncio.Runner() as runner:
        return runner.run(_names_async(found, aim, counter, size))


def _names(
    contender: Contender, target: Target, counter: Callable[[], float] | None, size: int
) -> dict[str, Any]:
    """A hold of each of so many names, one after the other, and of the last ones once more."""
    client: Any = contender.open(target)
    first = client.lock("first")
    first.acquire()
    first.release()
    requests = None if counter is None else counter()
    cpu, start = time.process_time(), time.perf_counter()
    for number in range(size):
        pair = client.lock(f"name:{number}")
        pair.acquire()
        pair.release()
    row = _names_row(size, start, cpu, requests, counter)
    client.close()
    return row


async def _names_async(
    contender: Contender, target: Target, counter: Callable[[], float] | None, size: int
) -> dict[str, Any]:
    client: Any = await contender.open(target)  # type: ignore[misc]
    requests = None if counter is None else counter()
    cpu, start = time.process_time(), time.perf_counter()
    for number in range(size):
        pair = client.lock(f"name:{number}")
        await pair.acquire()
        await pair.release()
    row = _names_row(size, start, cpu, requests, counter)
    await client.close()
    return row


def _names_row(
    size: int,
    start: float,
    cpu: float,
    requests: float | None,
    counter: Callable[[], float] | None,
) -> dict[str, Any]:
    seconds = time.perf_counter() - start
    row: dict[str, Any] = {
        "names": size,
        "hold_us": seconds / size * 1e6,
        "client_cpu_us": (time.process_time() - cpu) / size * 1e6,
        "requests_per_hold": None,
    }
    if counter is not None and requests is not None:
        row["requests_per_hold"] = (counter() - requests) / size
    return row
