"""What a lock will do to a fleet, before it is built: utilisation, waits, timeouts, a crash.

Workers ask for one name, wait in line in order of arrival, hold it and release it. Times between
requests are random (exponential), holds too by default; what the store costs for a free lock and
for a turn from one holder to the next is measured or taken from ``holdfast.lab.stores``.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from random import Random

from holdfast.lab.stores import STORES

__all__ = ["Costs", "Estimate", "Load", "costs_of", "estimate"]

MOST_REQUESTS = 20_000
CRASH_DELAY_SECONDS = 1.0
"""What is promised: a killed holder blocks others for its ttl and a second at the most."""
BUSY, FULL = 0.7, 0.95
"""Shares of the time that the name is held: waits grow fast above the first, without end above the
second."""
RARE = 0.02
LONG_SECONDS, MANY_REQUESTS = 10.0, 10
"""A crash that keeps the lock for as long, from as many requests, is worth a word of advice."""
MOST_WORKERS = 100_000
"""More would take memory and change no figure: so many requests are not simulated."""


@dataclass(frozen=True)
class Load:
    """What the fleet does with one name."""

    rate: float
    """Requests per second, of all workers together."""
    hold: float
    """Seconds that a request holds the lock, in the middle."""
    workers: int
    ttl: float = 30.0
    timeout: float | None = None
    limit: int = 1
    """Slots: how many hold at once."""
    steady: bool = False
    """Every hold lasts just as long; otherwise times are exponential."""


@dataclass(frozen=True)
class Costs:
    """What a store costs, in seconds."""

    free: float
    """To take and release a lock that nobody has."""
    turn: float
    """From the end of a hold to the beginning of the next one in line."""
    by_connection: bool = False
    """Whether the hold of a killed process ends with its connection, and not with its ttl."""


@dataclass
class Estimate:
    """The answer."""

    load: Load
    costs: Costs
    utilisation: float
    """Share of the time in which a slot is held or being handed over."""
    holds_per_second: float
    waits: list[float] = field(repr=False)
    """Seconds, sorted; of those that got the lock."""
    timed_out: float
    """Share of the requests that gave up."""
    blocked_seconds: float
    """How long a crashed holder keeps its slot, at the most."""
    backlog: int
    """How many wait by then."""
    crash_timed_out: int
    """How many have given up by then."""
    drain_seconds: float | None
    """How long it takes until that line is gone; ``None`` if it is never."""

    def wait(self, share: float) -> float:
        """The wait that this share of the requests does not exceed."""
        if not self.waits:
            return 0.0
        return self.waits[min(len(self.waits) - 1, int(share * len(self.waits)))]

    def advice(self) -> str:
        """The one thing to do."""
        load, room = self.load, self._room()
        if self.demand() >= FULL and room > 0:
            return (
                f"The name can't serve so many: split it (such as order:{{id}} in place of orders),"
                f" or hold it for less than {_shown(room)}, or let several hold it: a semaphore."
            )
        if self.demand() >= FULL:
            return "The name can't serve so many on this store, however short the holds: split it."
        if self.timed_out > 0.01:
            return (
                f"{self.timed_out:.0%} give up: wait longer than {_shown(load.timeout or 0)}, or "
                "hold it for less time."
            )
        if self.demand() >= BUSY:
            return "Waits grow fast from here: hold it for less time, or split the name."
        if self._crash_is_bad():
            return (
                f"After one crash nobody gets the lock for up to {_shown(self.blocked_seconds)}: "
                "choose a shorter ttl, or split the name."
            )
        if self.demand() < RARE and load.hold < 0.01:
            return (
                "They hardly ever meet. If the work is one statement of a database, a unique key "
                "or UPDATE … WHERE may do without a lock."
            )
        return "This fits."

    def _crash_is_bad(self) -> bool:
        load, blocked = self.load, self.blocked_seconds
        alone = load.limit == 1 and load.workers > 1
        return alone and blocked >= LONG_SECONDS and load.rate * blocked >= MANY_REQUESTS

    def demand(self) -> float:
        """Share of the time that all requests would need; 1 and more can't be served."""
        turn = self.load.hold + self.costs.turn
        return min(self.load.rate * turn / self.load.limit, 1e9)

    def _room(self) -> float:
        """The longest hold with which the name is busy, but not too busy."""
        return BUSY * self.load.limit / self.load.rate - self.costs.turn


def _shown(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def costs_of(store: str) -> Costs:
    """What the benchmarks say of a store; raises ``ValueError`` with the names for another one.
    ``local`` and ``postgresql``, as URLs begin, are names too."""
    for facts in STORES:
        if store in facts.names:
            free = (facts.hold_ms or 0.0) / 1000
            rate = facts.holds_per_second
            turn = free if rate is None else max(1 / rate - 0.001, 0.0)
            return Costs(free, turn, facts.ends_with == "connection")
    names = ", ".join(facts.store for facts in STORES)
    raise ValueError(f"there is no store {store!r}: one of {names}; --url measures your own")


def estimate(load: Load, costs: Costs, seed: int = 1) -> Estimate:
    """Simulates the fleet for so long that the figures are steady. The seed decides what is
    random."""
    run = _Simulation(load, costs, Random(seed))
    run.simulate()
    blocked = CRASH_DELAY_SECONDS + (0.0 if costs.by_connection else load.ttl)
    backlog, gave_up = _after_crash(load, costs, blocked)
    spare = load.limit / (load.hold + costs.turn) - load.rate
    return Estimate(
        load,
        costs,
        utilisation=min(1.0, run.busy / (run.now * load.limit)),
        holds_per_second=len(run.waits) / run.now,
        waits=sorted(run.waits),
        timed_out=run.timed_out / max(1, run.timed_out + len(run.waits)),
        blocked_seconds=blocked,
        backlog=backlog,
        crash_timed_out=gave_up,
        drain_seconds=backlog / spare if spare > 0 else None,
    )


def _after_crash(load: Load, costs: Costs, blocked: float) -> tuple[int, int]:
    """How many wait, and how many have given up, when a crashed holder's slot is free again."""
    timeout = blocked if load.timeout is None else min(load.timeout, blocked)
    unserved = max(0.0, load.rate - (load.limit - 1) / (load.hold + costs.turn))
    backlog = min(load.workers, unserved * timeout)
    if timeout:  # a worker that waits asks for nothing else
        unserved = min(unserved, load.workers / timeout)
    return round(backlog), round(unserved * (blocked - timeout))


class _Simulation:
    """The simulation: a heap of events, a line of waiting requests, free slots."""

    def __init__(self, load: Load, costs: Costs, random: Random) -> None:
        self._load, self._costs, self._random = load, costs, random
        self._events: list[tuple[float, int, str, int]] = []
        self._number = count()
        self._line: deque[tuple[int, float]] = deque()
        self._free_slots = load.limit
        self._requests = count()
        self.now = self.busy = 0.0
        self.waits: list[float] = []
        self.timed_out = 0

    def simulate(self) -> None:
        for _ in range(self._load.workers):
            self._after(self._pause(), "request")
        while len(self.waits) + self.timed_out < MOST_REQUESTS:
            self.now, _, what, subject = heapq.heappop(self._events)
            getattr(self, f"_{what}")(subject)

    def _after(self, seconds: float, what: str, subject: int = 0) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._number), what, subject))

    def _pause(self) -> float:
        """Until a worker asks again: all of them together ask as often as they should."""
        mean = self._load.workers / self._load.rate - self._load.hold - self._costs.free
        return self._random.expovariate(1 / mean) if mean > 0 else 0.0

    def _request(self, _: int) -> None:
        if self._free_slots:
            self._free_slots -= 1
            self._grant(self._costs.free, self._costs.free)
            return
        request = next(self._requests)
        self._line.append((request, self.now))
        if self._load.timeout is not None:
            self._after(self._load.timeout, "give_up", request)

    def _give_up(self, request: int) -> None:
        if any(waiting == request for waiting, _ in self._line):
            self._line = deque(entry for entry in self._line if entry[0] != request)
            self.timed_out += 1
            self._after(self._pause(), "request")

    def _grant(self, delay: float, waited: float) -> None:
        load = self._load
        held = load.hold if load.steady else self._random.expovariate(1 / load.hold)
        self.waits.append(waited)
        self.busy += delay + held
        self._after(delay + held, "release")

    def _release(self, _: int) -> None:
        self._after(self._pause(), "request")
        if not self._line:
            self._free_slots += 1
            return
        _request, since = self._line.popleft()
        self._grant(self._costs.turn, self.now - since + self._costs.turn)
