"""Redlock over five servers: all up, one hung, one down. What hangs or fails is told as such."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from typing import Any

from holdfast.bench.bounds import Alarm, limited
from holdfast.bench.contender import Book, Contender, Target
from holdfast.bench.figures import percentile, pinned
from holdfast.bench.jobs import find, read_target

__all__ = ["redlock_job"]

NAME = "redlocked"
WARM_HOLDS = 20
BEFORE_SECONDS = 0.5
"""How long it is watched before the fault strikes: by the same process, on the same connections."""
HANG_SECONDS = 2.5
FAULTS = {"one hung": signal.SIGSTOP, "one down": signal.SIGKILL}


class _Seen:
    """What one contender did; kept also where it hung in the middle."""

    def __init__(self) -> None:
        self.before: list[float] = []
        self.acquires: list[float] = []
        self.releases: list[float] = []
        self.errors: list[str] = []
        self.hung = ""
        self.doing = "acquire"

    def row(self) -> dict[str, Any]:
        return {
            "acquires": len(self.acquires),
            "before_p50_ms": _milli(percentile(self.before, 0.5)),
            "acquire_p50_ms": _milli(percentile(self.acquires, 0.5)),
            "acquire_p99_ms": _milli(percentile(self.acquires, 0.99)),
            "longest_ms": _milli(max(self.acquires, default=None)),
            "release_p50_ms": _milli(percentile(self.releases, 0.5)),
            "errors": len(self.errors),
            "hung": self.hung,
            "error": self.errors[0] if self.errors and not self.acquires else None,
        }


def redlock_job(book: Book, contender: str, target: list[Any], state: str, seconds: float) -> Any:
    """Acquires and releases for so long; the fault strikes after it was warm."""
    (found,), aim = find(book, [contender]), read_target(target)
    seen = _Seen()
    logging.disable()  # peers tell of every node that does not answer, thousands of times
    try:
        with pinned(aim.pids), limited(BEFORE_SECONDS + seconds + HANG_SECONDS):
            if found.flavour == "asyncio":
                asyncio.run(_play_async(found, aim, state, seconds, seen))
            else:
                _play(found, aim, state, seconds, seen)
    except (Alarm, TimeoutError):
        seen.hung = f"hung in {seen.doing}"
    return seen.row()


def _strike(target: Target, state: str) -> None:
    if state in FAULTS:
        os.kill(target.pids[-1], FAULTS[state])


def _play(contender: Contender, target: Target, state: str, seconds: float, seen: _Seen) -> None:
    client: Any = contender.open(target)
    pair = client.lock(f"{NAME}:{os.getpid()}")
    for _ in range(WARM_HOLDS):
        pair.acquire()
        pair.release()
    clock = time.perf_counter
    end = clock() + BEFORE_SECONDS
    while (start := clock()) < end:
        pair.acquire()
        seen.before.append(clock() - start)
        pair.release()
    _strike(target, state)
    end = clock() + seconds
    while (start := clock()) < end:
        try:
            seen.doing = "acquire"
            pair.acquire()
            held = clock()
            seen.acquires.append(held - start)
            seen.doing = "release"
            pair.release()
            seen.releases.append(clock() - held)
        except Exception as error:
            seen.errors.append(f"{type(error).__name__}: {error}"[:200])


async def _play_async(
    contender: Contender, target: Target, state: str, seconds: float, seen: _Seen
) -> None:
    client: Any = await contender.open(target)  # type: ignore[misc]
    pair = client.lock(f"{NAME}:{os.getpid()}")
    for _ in range(WARM_HOLDS):
        await pair.acquire()
        await pair.release()
    clock = time.perf_counter
    end = clock() + BEFORE_SECONDS
    while (start := clock()) < end:
        await pair.acquire()
        seen.before.append(clock() - start)
        await pair.release()
    _strike(target, state)
    end = clock() + seconds
    async with asyncio.timeout(seconds + HANG_SECONDS / 2) as limit:
        while (start := clock()) < end:
            try:
                seen.doing = "acquire"
                await pair.acquire()
                held = clock()
                seen.acquires.append(held - start)
                seen.doing = "release"
                await pair.release()
                seen.releases.append(clock() - held)
            except Exception as error:
                if limit.expired():
                    raise
                seen.errors.append(f"{type(error).__name__}: {error}"[:200])


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
