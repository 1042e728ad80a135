"""What Holdfast aims at, and whether this run reached it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.compare import find, library_of, limit_of, rate, ratio, rows_of
from benchmarks.results import Results

__all__ = ["Aim", "aims", "aims_table"]

Row = dict[str, Any]


class Aim(NamedTuple):
    """One line: what was compared, the bound, and what was seen."""

    what: str
    bound: float
    seen: float | None
    least: bool = True
    """Whether the bound is the least that will do; else it is the most."""

    @property
    def met(self) -> bool | None:
        if self.seen is None:
            return None
        return self.seen >= self.bound if self.least else self.seen <= self.bound


def aims(results: Results) -> Iterator[Aim]:
    yield from _uncontended(results)
    yield from _contended(results)
    yield from _many(results)
    yield from _redlock(results)


_UNCONTENDED = [
    # store, contender, against, at least
    ("redis", "Holdfast", "limit", 0.45),
    ("redis", "Holdfast asyncio", "limit", 0.40),
    ("etcd", "Holdfast", "limit", 0.80),
    ("consul", "Holdfast", "limit", 0.45),
    ("zookeeper", "Holdfast", "library", 0.80),
    ("postgres", "Holdfast", "library", 0.70),
    ("postgres", "Holdfast advisory", "library", 0.70),
    ("mysql", "Holdfast", "library", 0.70),
    ("mysql", "Holdfast advisory", "library", 0.70),
]
_ASYNCIO = ("etcd", "consul", "zookeeper")


def _uncontended(results: Results) -> Iterator[Aim]:
    for store, name, against, bound in _UNCONTENDED:
        rows = rows_of(results, "uncontended", store)
        row = find(rows, name)
        base = None
        if row is not None:
            base = limit_of(rows, row) if against == "limit" else library_of(rows, row)
        named = base["contender"] if base else against
        seen = ratio(rate(row, "pinned"), rate(base, "pinned"))
        yield Aim(f"{store}: {name}, uncontended, ÷ {named}", bound, seen)
    for store in _ASYNCIO:
        rows = rows_of(results, "uncontended", store)
        one, other = find(rows, "Holdfast asyncio"), find(rows, "Holdfast")
        seen = ratio(rate(one, "pinned"), rate(other, "pinned"))
        yield Aim(f"{store}: asyncio client ÷ blocking client", 0.70, seen)


_CONTENDED = [
    # store, contender, rate ÷ limit, fewest ÷ most, longest wait × limit's
    ("redis", "Holdfast", 0.85, 0.9, 3.0),
    ("etcd", "Holdfast", 1.0, 0.8, 3.0),
    ("consul", "Holdfast", 0.5, 0.8, 3.0),
    ("zookeeper", "Holdfast", 0.75, 0.8, 3.0),
    ("postgres", "Holdfast", 0.50, 0.8, 3.0),
    ("postgres", "Holdfast advisory", 0.80, 0.9, None),
    ("mysql", "Holdfast", 0.50, 0.8, 3.0),
    ("mysql", "Holdfast advisory", 0.80, 0.9, None),
]


# One stall of the machine hits one round.
_WAITS = {
    "usual_longest_wait_ms": "of a round, the middle of them",
    "longest_wait_ms": "of all rounds",
}


def _contended(results: Results) -> Iterator[Aim]:
    for store, name, bound, fair, wait in _CONTENDED:
        rows = rows_of(results, "sixteen", store)
        row = find(rows, name)
        limit = limit_of(rows, row) if row else None
        head = f"{store}: {name}, 16 processes"
        yield Aim(f"{head}, holds/s ÷ limit", bound, ratio(rate(row), rate(limit)))
        yield Aim(f"{head}, fewest ÷ most holds", fair, _of(row, "fewest_to_most"))
        if wait is not None:
            for field, of in _WAITS.items():
                longest = ratio(_of(row, field), _of(limit, field))
                yield Aim(f"{head}, longest wait {of}, ÷ limit's", wait, longest, least=False)
        for field, what in (("overlaps", "overlaps"), ("sinking_tokens", "tokens that sank")):
            yield Aim(f"{head}, {what}", 0.0, _of(row, field), least=False)


def _of(row: Row | None, field: str) -> float | None:
    found = None if row is None else row.get(field)
    return None if found is None else float(found)


def _many(results: Results) -> Iterator[Aim]:
    rows = rows_of(results, "drain", "redis")
    for name, bound in (("Holdfast asyncio", 0.40), ("Holdfast", 0.30)):
        row = find(rows, name)
        limit = limit_of(rows, row) if row else None
        crowd = "1,000 tasks" if "asyncio" in name else "200 threads"
        yield Aim(f"redis: {crowd} drained ÷ limit", bound, ratio(rate(row), rate(limit)))
    row = find(rows, "Holdfast asyncio")
    yield Aim(
        "redis: 1,000 tasks, requests per hold", 2.2, _of(row, "requests_per_hold"), least=False
    )
    yield Aim("redis: 1,000 tasks, connections", 6, _of(row, "connections"), least=False)
    for store in ("etcd", "consul", "zookeeper"):
        row = find(rows_of(results, "drain", store), "Holdfast asyncio")
        yield Aim(f"{store}: 1,000 tasks, connections", 3, _of(row, "connections"), least=False)
    for name in ("Holdfast", "Holdfast asyncio"):
        row = find(rows_of(results, "held", "redis"), name)
        threads = _of(row, "threads")
        own = None if threads is None else threads - 1
        yield Aim(f"redis: 1,000 leases, {name}: threads beside the main one", 2, own, least=False)
        batches = _of(row, "batches_per_interval")
        yield Aim(f"redis: 1,000 leases, {name}: batches per interval", 1.5, batches, least=False)


def _redlock(results: Results) -> Iterator[Aim]:
    rows = rows_of(results, "redlock", "redlock")
    for name in ("Holdfast", "Holdfast asyncio"):
        up = _of(find(rows, name, state="all up"), "acquire_p50_ms")
        hung = find(rows, name, state="one hung")
        slower = ratio(_of(hung, "acquire_p50_ms"), _of(hung, "before_p50_ms"))
        limit = _of(find(rows, "raw sockets ×5, same scripts", state="all up"), "acquire_p50_ms")
        yield Aim(f"redlock: {name}, all up, × limit", 3.0, ratio(up, limit), least=False)
        yield Aim(f"redlock: {name}, one hung ÷ all up", 1.2, slower, least=False)


def aims_table(results: Results, table: Callable[..., str]) -> str:
    """Met or not, or not run."""
    words = {True: "yes", False: "**no**", None: "not run"}
    lines = [
        [aim.what, f"{'≥' if aim.least else '≤'} {aim.bound:g}", _digits(aim.seen), words[aim.met]]
        for aim in aims(results)
    ]
    return table(["what", "aim", "seen", "met"], lines)


def _digits(seen: float | None) -> str:
    return "–" if seen is None else f"{seen:.3g}"
