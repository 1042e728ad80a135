"""What ``holdfast bench`` does to a user's store, in sizes that production does not mind."""

from __future__ import annotations

from typing import Any

from holdfast.bench.forkserver import ForkServer
from holdfast.bench.own_book import contenders

__all__ = ["CASES", "carry_out"]

_CONTENDED = {
    "HOLDS/S": "holds_per_second",
    "HAND-OVER p50 µs": "handover_p50_us",
    "p99 µs": "handover_p99_us",
    "LONGEST WAIT ms": "longest_wait_ms",
    "FEWEST/MOST": "fewest_to_most",
    "OVERLAPS": "overlaps",
    "CPU ms/HOLD": "client_cpu_ms",
}
CASES: dict[str, tuple[str, dict[str, str]]] = {
    # case: (what it shows, heading -> field)
    "uncontended": (
        "One process, nobody else",
        {
            "HOLDS/S": "free.holds_per_second",
            "p50 µs": "free.p50_us",
            "p99 µs": "free.p99_us",
            "CPU µs/HOLD": "free.client_cpu_us",
        },
    ),
    "two": ("2 processes on one lock, 1 ms holds", _CONTENDED),
    "sixteen": ("16 processes on one lock, 1 ms holds", _CONTENDED),
    "several": ("16 processes, four on each of four locks, 1 ms holds", _CONTENDED),
    "drain": (
        "100 waiters of one process drain one lock",
        {
            "SERVED": "served",
            "OF": "waiters",
            "SECONDS": "seconds",
            "HOLDS/S": "holds_per_second",
            "CONNECTIONS": "connections",
            "THREADS": "threads",
        },
    ),
    "held": (
        "100 leases held with a ttl of 10 s",
        {
            "LEASES": "leases",
            "LOST": "lost",
            "THREADS": "threads",
            "CONNECTIONS": "connections",
            "CPU %": "client_cpu_percent",
            "MEMORY MB": "memory_mb",
        },
    ),
}
PROCESSES = {"two": 2, "sixteen": 16, "several": 16}
LOCKS = {"several": 4}
WAITERS = LEASES = 100
EXTRA_SECONDS = 45.0


def carry_out(
    case: str, url: str, namespace: str, forkserver: ForkServer, *, quick: bool
) -> list[dict[str, Any]]:
    """A row for each client."""
    target = [url, [], namespace]
    keys = [one.key for one in contenders()]
    seconds = 1.0 if quick else 4.0
    if case == "uncontended":
        rounds = 3 if quick else 15
        rows: Any = forkserver.run(
            case, allowed=60, contenders=keys, target=target, rounds=rounds, slice_seconds=0.1
        )
        return rows if isinstance(rows, list) else [{"contender": "Holdfast", **rows}]
    words = _words(case, seconds, quick)
    return [
        {
            "contender": one.name,
            **forkserver.run(
                words["job"],
                allowed=seconds + EXTRA_SECONDS,
                contender=one.key,
                target=target,
                **{key: value for key, value in words.items() if key != "job"},
            ),
        }
        for one in contenders()
    ]


def _words(case: str, seconds: float, quick: bool) -> dict[str, Any]:
    if case in PROCESSES:
        return {
            "job": "contended",
            "processes": PROCESSES[case],
            "seconds": seconds,
            "hold_seconds": 0.001,
            "pause_seconds": 0.0,
            "locks": LOCKS.get(case, 1),
        }
    if case == "drain":
        return {
            "job": "drain",
            "waiters": WAITERS,
            "settle_seconds": 0.5,
            "idle_seconds": 0.1,
            "limit_seconds": 20.0,
        }
    return {"job": "held", "leases": LEASES, "seconds": 1.0 if quick else 12.0}
