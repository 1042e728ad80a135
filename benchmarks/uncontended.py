"""One process, nobody else: acquire and release, as often as it goes.

Contenders take turns in short rounds, so that noise hits all alike. Pinned, client and server
share one core, and the ratio shows what the client itself costs; free, the wake-ups between the
cores cost more than any client does.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from benchmarks.contenders import Contender, Hold

__all__ = ["Row", "measure", "pinned"]

ROUND_SECONDS = 0.12


class Row(NamedTuple):
    """What one contender reached."""

    contender: Contender
    per_second: float
    cpu_microseconds: float


@contextmanager
def pinned(pid: int | None) -> Iterator[None]:
    """This process and a server share the last core meanwhile."""
    before = os.sched_getaffinity(0)
    core = {max(before)}
    os.sched_setaffinity(0, core)
    if pid is not None:
        os.sched_setaffinity(pid, core)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        if pid is not None:
            os.sched_setaffinity(pid, before)


def _round(hold: Hold) -> tuple[float, float]:
    count = 0
    cpu, start = time.process_time(), time.perf_counter()
    end = start + ROUND_SECONDS
    while time.perf_counter() < end:
        for _ in range(50):
            hold()
        count += 50
    elapsed = time.perf_counter() - start
    return count / elapsed, (time.process_time() - cpu) / count * 1_000_000


def measure(contenders: list[Contender], url: str, rounds: int) -> list[Row]:
    """Medians over interleaved rounds."""
    holds = [(contender, contender.open(url)) for contender in contenders]
    seen: dict[str, list[tuple[float, float]]] = {c.name: [] for c in contenders}
    for _, hold in holds:
        _round(hold)
    for _ in range(rounds):
        for contender, hold in holds:
            seen[contender.name].append(_round(hold))
    return [
        Row(
            contender,
            statistics.median(rate for rate, _ in seen[contender.name]),
            statistics.median(cpu for _, cpu in seen[contender.name]),
        )
        for contender in contenders
    ]
