"""Many waiters in one process on one lock, let go at once, with no hold time.

Before they are let go they wait for a while: what is sent then is what waiting itself costs.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from holdfast.bench.contender import Book, Contender, Pair, Target
from holdfast.bench.figures import connections_to, thread_count
from holdfast.bench.jobs import find, read_target

__all__ = ["Tally", "drain_job"]

STACK_BYTES = 256 * 1024

Counter = Callable[[], float]


class Tally:
    """Counts the waiters' turns, from any thread; knows when the last one was served."""

    def __init__(self, waiters: int) -> None:
        self.waiters = waiters
        self.served = 0
        self.asked = 0
        self.errors: list[str] = []
        self.last = 0.0
        self.done = threading.Event()
        self._mutex = threading.Lock()

    def asking(self) -> None:
        with self._mutex:
            self.asked += 1

    def serve(self) -> None:
        with self._mutex:
            self.served += 1
            self.last = time.perf_counter()
            self._check()

    def fail(self, error: BaseException) -> None:
        with self._mutex:
            self.errors.append(f"{type(error).__name__}: {error}"[:200])
            self._check()

    def _check(self) -> None:
        if self.served + len(self.errors) >= self.waiters:
            self.done.set()


class _Before(NamedTuple):
    """What was seen before the waiters were let go."""

    idle_requests: float | None
    requests: float | None
    connections: int
    threads: int
    cpu: float
    at: float


def drain_job(
    book: Book,
    contender: str,
    target: list[Any],
    waiters: int,
    settle_seconds: float,
    idle_seconds: float,
    limit_seconds: float,
) -> Any:
    """Threads for a blocking contender, tasks for an asyncio one."""
    (found,), aim = find(book, [contender]), read_target(target)
    tally = Tally(waiters)
    counter = book.request_counter(found.store, aim.url)
    pace = (settle_seconds, idle_seconds, limit_seconds)
    port = urlsplit(aim.url).port or 0
    if found.flavour == "blocking":
        before, after = _with_threads(found, aim, tally, counter, pace, port)
    else:
        with asyncio.Runner() as runner:
            before, after = runner.run(_with_tasks(found, aim, tally, counter, pace, port))
    return _row(tally, before, after)


def _row(tally: Tally, before: _Before, after: tuple[float, float | None]) -> dict[str, Any]:
    cpu, requests = after
    seconds = max(tally.last - before.at, 1e-9)
    served = tally.served
    row: dict[str, Any] = {
        "served": served,
        "waiters": tally.waiters,
        "seconds": seconds if served else None,
        "holds_per_second": served / seconds if served else 0.0,
        "client_cpu_us": (cpu - before.cpu) / served * 1e6 if served else None,
        "connections": before.connections,
        "threads": before.threads,
        "idle_requests_per_second": before.idle_requests,
        "requests_per_hold": None,
    }
    if served and requests is not None and before.requests is not None:
        row["requests_per_hold"] = (requests - before.requests) / served
    if tally.errors:
        row["errors"] = sorted(set(tally.errors))[:3]
    return row


def _ask(counter: Counter | None) -> float | None:
    return None if counter is None else counter()


def _look(counter: Counter | None, idle: tuple[float | None, float], port: int) -> _Before:
    """The last look before the waiters are let go."""
    requests = _ask(counter)
    was, seconds = idle
    quiet = None if requests is None or was is None else (requests - was) / seconds
    seen = connections_to(port) if port else 0
    return _Before(quiet, requests, seen, thread_count(), time.process_time(), time.perf_counter())


def _with_threads(
    contender: Contender,
    target: Target,
    tally: Tally,
    counter: Counter | None,
    pace: tuple[float, float, float],
    port: int,
) -> tuple[_Before, tuple[float, float | None]]:
    settle, idle, limit = pace
    name = f"drained:{os.getpid()}"
    client: Any = contender.open(target)
    holder = client.lock(name)
    holder.acquire()
    threading.stack_size(STACK_BYTES)

    def wait(pair: Pair) -> None:
        try:
            tally.asking()
            pair.acquire()
            pair.release()
            tally.serve()
        except Exception as error:  # noqa: BLE001 - part of the result
            tally.fail(error)

    for _ in range(tally.waiters):
        threading.Thread(target=wait, args=(client.lock(name),), daemon=True).start()
    time.sleep(settle)
    was = _ask(counter)
    time.sleep(idle)
    before = _look(counter, (was, idle), port)
    holder.release()
    tally.done.wait(limit)
    return before, (time.process_time(), _ask(counter))


async def _with_tasks(
    contender: Contender,
    target: Target,
    tally: Tally,
    counter: Counter | None,
    pace: tuple[float, float, float],
    port: int,
) -> tuple[_Before, tuple[float, float | None]]:
    settle, idle, limit = pace
    name = f"drained:{os.getpid()}"
    client: Any = await contender.open(target)  # type: ignore[misc]
    holder = client.lock(name)
    await holder.acquire()

    async def wait(pair: Pair) -> None:
        try:
            tally.asking()
            await pair.acquire()
            await pair.release()
            tally.serve()
        except Exception as error:  # noqa: BLE001 - part of the result
            tally.fail(error)

    tasks = [asyncio.create_task(wait(client.lock(name))) for _ in range(tally.waiters)]
    await asyncio.sleep(settle)
    was = await asyncio.to_thread(_ask, counter)
    await asyncio.sleep(idle)
    before = await asyncio.to_thread(_look, counter, (was, idle), port)
    await holder.release()
    await asyncio.wait(tasks, timeout=limit)
    result = before, (time.process_time(), await asyncio.to_thread(_ask, counter))
    for task in tasks:
        task.cancel()
    return result
