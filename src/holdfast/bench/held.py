"""Many locks held at once by one process: what keeping them costs while nothing happens."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from holdfast.bench.contender import Book, Contender, Target
from holdfast.bench.figures import connections_to, cpu_seconds, memory_megabytes, thread_count
from holdfast.bench.jobs import find, read_target

__all__ = ["held_job"]

TAKING_SECONDS = 120.0
"""How long the taking of all of them may last; what is held by then is what counts."""


def held_job(book: Book, contender: str, target: list[Any], leases: int, seconds: float) -> Any:
    """Takes the locks, watches for so long, gives them back."""
    (found,), aim = find(book, [contender]), read_target(target)
    counter = book.request_counter(found.store, aim.url)
    if found.flavour == "blocking":
        return _blocking(found, aim, counter, leases, seconds)
    with asyncio.Runner() as runner:
        return runner.run(_asyncio(found, aim, counter, leases, seconds))


class _Watch:
    """Reads the figures at the start and at the end."""

    def __init__(self, target: Target, counter: Callable[[], float] | None) -> None:
        self._target, self._counter = target, counter
        self._requests = None if counter is None else counter()
        self._server = cpu_seconds(target.pids)
        self._cpu, self._at = time.process_time(), time.perf_counter()

    def row(self, held: int, taking: float) -> dict[str, Any]:
        """All figures per second, and the span, for counters outside of this process."""
        seconds = time.perf_counter() - self._at
        cpu = time.process_time() - self._cpu
        requests = None
        if self._counter is not None and self._requests is not None:
            requests = (self._counter() - self._requests) / seconds
        until = time.monotonic()
        return {
            "leases": held,
            "taking_seconds": taking,
            "threads": thread_count(),
            "connections": connections_to(urlsplit(self._target.url).port or 0),
            "requests_per_second": requests,
            "client_cpu_percent": 100 * cpu / seconds,
            "server_cpu_percent": 100 * (cpu_seconds(self._target.pids) - self._server) / seconds,
            "memory_mb": memory_megabytes(),
            "since": until - seconds,
            "until": until,
        }


def _blocking(
    contender: Contender,
    target: Target,
    counter: Callable[[], float] | None,
    leases: int,
    seconds: float,
) -> dict[str, Any]:
    assert contender.open_held is not None
    client: Any = contender.open_held(target)
    start = time.perf_counter()
    pairs = []
    for number in range(leases):
        if time.perf_counter() - start > TAKING_SECONDS:
            break
        pairs.append(client.lock(f"held:{os.getpid()}:{number}"))
        pairs[-1].acquire()
    taking = time.perf_counter() - start
    watch = _Watch(target, counter)
    time.sleep(seconds)
    row = watch.row(len(pairs), taking)
    start = time.perf_counter()
    row["lost"] = sum(pair.release() is False for pair in pairs)
    row["releasing_seconds"] = time.perf_counter() - start
    client.close()
    return row


async def _asyncio(
    contender: Contender,
    target: Target,
    counter: Callable[[], float] | None,
    leases: int,
    seconds: float,
) -> dict[str, Any]:
    assert contender.open_held is not None
    client: Any = await contender.open_held(target)  # type: ignore[misc]
    start = time.perf_counter()
    pairs = []
    for number in range(leases):
        if time.perf_counter() - start > TAKING_SECONDS:
            break
        pairs.append(client.lock(f"held:{os.getpid()}:{number}"))
        await pairs[-1].acquire()
    taking = time.perf_counter() - start
    watch = _Watch(target, counter)
    await asyncio.sleep(seconds)
    row = watch.row(len(pairs), taking)
    start = time.perf_counter()
    row["lost"] = sum([await pair.release() is False for pair in pairs])
    row["releasing_seconds"] = time.perf_counter() - start
    await client.close()
    return row
