"""The stores side by side: what each promises, and how fast it was when it was last measured.

``holdfast stores`` prints this table, and the page docs/guides/choose-a-store.md shows it; a test
holds the page, the guarantees and the figures of docs/benchmarks.md to it.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.contract import Guarantee
from holdfast.testing.guarantees import GUARANTEES

__all__ = ["STORES", "StoreFacts", "markdown"]


class StoreFacts(NamedTuple):
    """One store, as a row of the comparison."""

    store: str
    """Its name in the table of guarantees."""
    url: str
    ends_with: str
    """What ends a hold whose process has died."""
    consistency: str
    """On what the store's answers rest."""
    hold_ms: float | None = None
    """Milliseconds to take and release a free lock: half of all holds were faster."""
    holds_per_second: int | None = None
    """Of 16 processes on one lock, which hold it for a millisecond each."""

    @property
    def names(self) -> frozenset[str]:
        """What it may be called: its name, and how its URLs begin."""
        mode = "-advisory" if "mode=advisory" in self.url else ""
        schemes = (url.partition(":")[0] for url in self.url.split(", "))
        return frozenset({self.store, *(f"{scheme}{mode}" for scheme in schemes)})

    @property
    def guarantees(self) -> frozenset[Guarantee]:
        return GUARANTEES[self.store]

    @property
    def order(self) -> str:
        if Guarantee.FIFO in self.guarantees:
            return "by arrival"
        return "as the server decides" if self.ends_with == "connection" else "in any order"

    @property
    def survives(self) -> str:
        if Guarantee.SURVIVES_SERVER_LOSS in self.guarantees:
            return "a minority"
        return "–" if Guarantee.CROSS_HOST not in self.guarantees else "none"

    @property
    def reach(self) -> str:
        if Guarantee.CROSS_HOST in self.guarantees:
            return "many hosts"
        return "one process" if self.store == "memory" else "one machine"

    @property
    def modes(self) -> str:
        words = {Guarantee.EXCLUSIVE: "lock", Guarantee.SHARED: "shared", Guarantee.SLOTS: "slots"}
        return ", ".join(word for each, word in words.items() if each in self.guarantees)

    @property
    def records(self) -> str:
        return "yes" if Guarantee.RECORDS in self.guarantees else "–"

    def speed(self) -> tuple[str, str]:
        """Both figures for people; "–" for one that was not measured."""
        return (
            "–" if self.hold_ms is None else f"{self.hold_ms:g} ms",
            "–" if self.holds_per_second is None else f"{self.holds_per_second:,}/s",
        )

    def as_plain_data(self) -> dict[str, object]:
        """For programs."""
        fields = ("reach", "order", "survives")
        return {
            **self._asdict(),
            **{field: getattr(self, field) for field in fields},
            "guarantees": sorted(map(str, self.guarantees)),
        }


_DATABASE = "one primary, durable commits"
_CONSENSUS = "consensus of a majority"

# Blocking clients, from docs/benchmarks.md: p50 of "One process, nobody else", holds/s of "16
# processes on one lock". Redlock: acquire and release over five servers.
STORES = (
    StoreFacts("memory", "memory://", "ttl", "this process", 0.043),
    StoreFacts("sqlite", "local, sqlite:///path", "ttl", "transactions on one file", 0.09, 384),
    StoreFacts("redis", "redis://", "ttl", "one server, in memory", 0.076, 726),
    StoreFacts("redlock", "redlock://a,b,c", "ttl", "a majority of servers, and clocks", 0.94),
    StoreFacts("zookeeper", "zookeeper://a,b,c", "session", _CONSENSUS, 1.24, 396),
    StoreFacts("etcd", "etcd://a,b,c", "lease", _CONSENSUS, 1.52, 321),
    StoreFacts("consul", "consul://", "session", _CONSENSUS, 1.51, 270),
    StoreFacts("postgres", "postgresql://", "ttl", _DATABASE, 0.81, 485),
    StoreFacts(
        "postgres-advisory", "postgresql://…?mode=advisory", "connection", _DATABASE, 0.5, 519
    ),
    StoreFacts("mysql", "mysql://", "ttl", _DATABASE, 0.71, 383),
    StoreFacts("mysql-advisory", "mysql://…?mode=advisory", "connection", _DATABASE, 0.52, 524),
)

HEADS = (
    "store",
    "reaches",
    "consistency",
    "a dead holder's lock ends with its",
    "waiters are served",
    "survives the loss of which servers",
    "modes",
    "once, every",
    "a free lock",
    "16 processes",
)


def markdown() -> str:
    """The table of the guide."""
    rows = [HEADS, ("---",) * len(HEADS), *map(_row, STORES)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(facts: StoreFacts) -> tuple[str, ...]:
    urls = ", ".join(f"`{url}`" for url in facts.url.split(", "))
    promises = (facts.ends_with, facts.order, facts.survives, facts.modes, facts.records)
    return (urls, facts.reach, facts.consistency, *promises, *facts.speed())
