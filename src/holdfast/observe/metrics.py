"""The metrics, and which event changes which: once, for OpenTelemetry and Prometheus."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.claim import kind_of
from holdfast.core.events import (
    Acquired,
    Cancelled,
    FenceRefused,
    Leading,
    Lost,
    Observer,
    Ran,
    Released,
    Renewed,
    Requested,
    TimedOut,
    WaitBegan,
    limited,
)

__all__ = ["BUCKETS", "METRICS", "Metric", "Metrics", "server_of", "system_of"]

BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds: a millisecond to five minutes, for waits and holds alike."""


class Metric(NamedTuple):
    """One metric, with its name in both systems."""

    name: str
    """For OpenTelemetry."""
    prometheus: str
    shape: str
    """``histogram``, ``counter`` or ``level`` (goes up and down)."""
    unit: str
    text: str
    labels: tuple[str, ...]


WAIT = Metric(
    *("holdfast.lock.wait_time", "holdfast_lock_wait_seconds", "histogram", "s"),
    "How long acquires took",
    ("kind", "mode", "outcome", "contended"),
)
HOLD = Metric(
    *("holdfast.lock.hold_time", "holdfast_lock_hold_seconds", "histogram", "s"),
    "How long locks were held",
    ("kind", "mode", "outcome"),
)
LOCKS = Metric(
    *("holdfast.lock.count", "holdfast_locks", "level", "{lock}"),
    "Locks that this process holds or waits for",
    ("kind", "state"),
)
LOSSES = Metric(
    *("holdfast.lock.losses", "holdfast_lock_lost", "counter", "{lock}"),
    "Holds that ended before they were released",
    ("kind", "reason"),
)
RENEW = Metric(
    *("holdfast.renew.duration", "holdfast_renew_seconds", "histogram", "s"),
    "How long batches of renewals took",
    ("store", "error"),
)
RENEW_FAILURES = Metric(
    *("holdfast.renew.failures", "holdfast_renew_failures", "counter", "{renewal}"),
    "Batches of renewals that the store did not answer",
    ("store", "error"),
)
OPERATION = Metric(
    *("holdfast.operation.duration", "holdfast_operation_seconds", "histogram", "s"),
    "How long requests to the store took",
    ("operation", "store", "error"),
)
LEADER = Metric(
    *("holdfast.leader", "holdfast_leader", "level", "{leader}"),
    "1 while this process leads an election",
    ("kind",),
)
RUNS = Metric(
    *("holdfast.once.runs", "holdfast_once_runs", "counter", "{run}"),
    "Calls of jobs of once and every",
    ("kind", "outcome"),
)
REFUSALS = Metric(
    *("holdfast.fence.refusals", "holdfast_fence_refused", "counter", "{fence}"),
    "Stale fences that guards of this process refused",
    ("resource",),
)
METRICS = (*(WAIT, HOLD, LOCKS, LOSSES, RENEW, RENEW_FAILURES, OPERATION, LEADER, RUNS, REFUSALS),)

SYSTEMS = {"rediss": "redis", "unix": "redis", "redlock": "redis", "etcds": "etcd"}
SYSTEMS |= {"consuls": "consul", "postgres": "postgresql", "local": "sqlite"}


def system_of(store: str) -> str:
    """The name of the database system of a store's URL, as OpenTelemetry spells it."""
    scheme = store.partition(":")[0].partition("+")[0]
    return SYSTEMS.get(scheme, scheme)


def server_of(store: str) -> str:
    """The servers of a store's URL: ``host:port``, several with commas; empty if it has none."""
    rest = store.partition("://")[2]
    return rest.partition("/")[0].partition("?")[0].rpartition("@")[2]


class Metrics(Observer):
    """Turns events into changes of metrics. Labels are values in the order of the metric's."""

    def add(self, metric: Metric, amount: float, store: str, *labels: str) -> None:
        """Adds to a counter or a level, or a value to a histogram."""
        raise NotImplementedError

    def waiting(self, event: WaitBegan) -> None:
        self.add(LOCKS, 1, event.store, event.kind, "waiting")

    def acquired(self, event: Acquired) -> None:
        self._waited(event, event.seconds, "granted")
        self.add(LOCKS, 1, event.store, event.kind, "held")

    def timed_out(self, event: TimedOut) -> None:
        self._waited(event, event.seconds, "timeout")

    def cancelled(self, event: Cancelled) -> None:
        self._waited(event, event.seconds, event.outcome)

    def _waited(self, event: Acquired | TimedOut | Cancelled, seconds: float, outcome: str) -> None:
        contended = event.use.contended
        if contended:
            self.add(LOCKS, -1, event.store, event.kind, "waiting")
        labels = event.kind, str(event.mode), outcome, "true" if contended else "false"
        self.add(WAIT, seconds, event.store, *labels)

    def released(self, event: Released) -> None:
        self._held(event, event.seconds, "released")

    def lost(self, event: Lost) -> None:
        self._held(event, event.seconds, "lost")
        self.add(LOSSES, 1, event.store, event.kind, event.cause)

    def _held(self, event: Released | Lost, seconds: float, outcome: str) -> None:
        self.add(LOCKS, -1, event.store, event.kind, "held")
        self.add(HOLD, seconds, event.store, event.kind, str(event.mode), outcome)

    def renewed(self, event: Renewed) -> None:
        store = system_of(event.store)
        self.add(RENEW, event.seconds, event.store, store, event.error)
        if event.error:
            self.add(RENEW_FAILURES, 1, event.store, store, event.error)

    def requested(self, event: Requested) -> None:
        labels = event.operation, system_of(event.store), event.error
        self.add(OPERATION, event.seconds, event.store, *labels)

    def leading(self, event: Leading) -> None:
        self.add(LEADER, 1 if event.leading else -1, event.store, event.kind)

    def ran(self, event: Ran) -> None:
        self.add(RUNS, 1, event.store, event.kind, event.outcome)

    def refused(self, event: FenceRefused) -> None:
        self.add(REFUSALS, 1, "", limited(kind_of(event.resource)))
