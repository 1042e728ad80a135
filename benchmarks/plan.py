"""What a run consists of: steps of one case on one store, and how long each may take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.book import STORES, contenders
from holdfast.bench.contender import CONTENDED, DRAIN, REDLOCK, UNCONTENDED, Contender

__all__ = ["CASES", "Size", "Step", "plan", "sizes"]

CASES = {
    # case: what it is, for people
    "uncontended": "one process, nobody else",
    "two": "2 processes on one lock",
    "sixteen": "16 processes on one lock",
    "sixteen-pause": "16 processes on one lock, 10 ms away from it after each hold",
    "several": "16 processes, four on each of four locks",
    "drain": "200 threads or 1,000 tasks drain one lock",
    "held": "1,000 held leases",
    "redlock": "Redlock over five servers",
    "growth-waiters": "1 to 10,000 waiters",
    "growth-leases": "1 to 100,000 held leases",
    "growth-names": "1 to 100,000 names",
}
PROCESSES = {"two": 2, "sixteen": 16, "sixteen-pause": 16, "several": 16}
LOCKS = {"several": 4}
HOLD_SECONDS = 0.001
PAUSE_SECONDS = {"sixteen-pause": 0.01}
REDLOCK_STATES = ("all up", "one hung", "one down")
FIRST_STORES = ("sqlite", "redis")
"""Quick enough to grow all the way; the others stop at a tenth."""


class Size(NamedTuple):
    """How much of everything."""

    quick: bool
    rounds: int
    slice_seconds: float
    contended_rounds: int
    compared_rounds: int
    """How many of ours and their limit, where the two are held to a bound."""
    contended_seconds: float
    settle_seconds: float
    drain_rounds: int
    drain_limit_seconds: float
    leases: int
    watch_seconds: float
    redlock_rounds: int
    redlock_seconds: float
    largest: int


FULL = Size(False, 16, 0.1, 2, 6, 1.5, 2.0, 3, 12.0, 1000, 8.0, 5, 1.5, 100_000)
QUICK = Size(True, 2, 0.04, 1, 1, 0.5, 0.5, 1, 3.0, 200, 3.5, 1, 0.3, 100)


def sizes(quick: bool) -> Size:
    return QUICK if quick else FULL


class Step(NamedTuple):
    """One case on one store with all of its contenders: one file of results."""

    case: str
    store: str
    players: list[Contender]

    @property
    def name(self) -> str:
        return f"{self.case}-{self.store}"


def plan(stores: list[str], cases: list[str], size: Size) -> list[Step]:
    """Store by store, so that each server is started once."""
    return [
        Step(case, store, players)
        for store in STORES
        if not stores or store in stores
        for case in CASES
        if not cases or case in cases or ("growth" in cases and case.startswith("growth"))
        if (players := list(_players(case, store, size)))
    ]


def _players(case: str, store: str, size: Size) -> Iterator[Contender]:
    found = [one for one in contenders() if one.store == store and _plays(one, case)]
    if size.quick and case != "uncontended":
        yield from _few(found, case, store)
    else:
        yield from found


def _few(found: list[Contender], case: str, store: str) -> Iterator[Contender]:
    """For a quick look: the limits, ourselves and one peer; crowds on Redis alone."""
    if case in ("two", "sixteen-pause", "several", "growth-leases"):
        return
    if case.startswith(("drain", "held", "growth")) and store != "redis":
        return
    flavours = ("blocking", "asyncio") if case.startswith(("drain", "growth")) else ("blocking",)
    roles = ("ours", "limit") if case in ("drain", "held") else ("ours", "limit", "least", "peer")
    seen: set[Any] = set()
    for one in found:
        key = (one.role, one.flavour)
        if one.flavour in flavours and one.role in roles and key not in seen:
            seen.add(key)
            yield one


def _plays(one: Contender, case: str) -> bool:
    if case == "held":
        return one.open_held is not None and one.store not in ("redlock", "memory")
    if case == "redlock":
        return REDLOCK in one.cases
    if case.startswith("growth"):
        wanted = "asyncio" if case == "growth-waiters" else "blocking"
        grows = one.role == "ours" and one.store != "memory" and DRAIN in one.cases
        return grows and one.flavour == wanted
    if case == "several" and one.role not in ("ours", "limit"):
        return False
    kinds = {"uncontended": UNCONTENDED, "drain": DRAIN}
    return kinds.get(case, CONTENDED) in one.cases


def growth(case: str, store: str, size: Size) -> list[int]:
    """The points of a plot."""
    largest = size.largest if store in FIRST_STORES else size.largest // 10
    if case == "growth-waiters":
        largest = min(largest, 10_000)
    return [10**power for power in range(6) if 10**power <= max(largest, 100)]
