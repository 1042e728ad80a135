"""Prometheus: the metrics of this process, and those of a whole store, read at each scrape."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from holdfast.claim import is_election
from holdfast.core.events import MOST_KINDS, OTHER
from holdfast.errors import HoldfastError
from holdfast.observe.metrics import BUCKETS, METRICS, Metric, Metrics

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "holdfast.observe.Prometheus needs 'prometheus_client': pip install 'holdfast[prometheus]'",
        name=error.name,
    ) from None

if TYPE_CHECKING:
    from holdfast.claim import LockInfo
    from holdfast.locks import Locks

__all__ = ["FleetCollector", "Prometheus"]

_made: WeakKeyDictionary[CollectorRegistry, dict[Metric, Any]] = WeakKeyDictionary()
"""A registry has each metric once, however many observers there are."""


class Prometheus(Metrics):
    """The metrics of this process, in a registry of ``prometheus_client``.

    In multiprocess mode (``PROMETHEUS_MULTIPROC_DIR``) the processes of a server are added up, and
    what is held and waited for by those that are alive.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        if registry not in _made:
            _made[registry] = {metric: _metric(registry, metric) for metric in METRICS}
        self._metrics = _made[registry]

    def add(self, metric: Metric, amount: float, store: str, *labels: str) -> None:
        child = self._metrics[metric].labels(*labels)
        if metric.shape == "histogram":
            child.observe(amount)
        else:
            child.inc(amount)


def _metric(registry: CollectorRegistry, metric: Metric) -> Any:
    words = metric.prometheus, metric.text, metric.labels
    if metric.shape == "histogram":
        return Histogram(*words, buckets=BUCKETS, registry=registry)
    if metric.shape == "counter":
        return Counter(*words, registry=registry)
    return Gauge(*words, multiprocess_mode="livesum", registry=registry)


class FleetCollector(Collector):
    """What a store holds at the moment of the scrape, by kind, for all processes of the fleet.

    A process that has died leaves nothing behind in it. A store that can't be read gives
    ``holdfast_fleet_up`` 0, and none of the others.
    """

    def __init__(self, locks: Locks) -> None:
        self._locks = locks
        self._one_scan = threading.Lock()
        self._began = -math.inf
        """When the last scan began, on the monotonic clock."""
        self._found: list[GaugeMetricFamily] = []

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """The families without values: the registry needs no scan to know their names."""
        return [*_families(), _up(0.0)]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One scan of the store. Scrapes that arrive during a scan share the next one."""
        arrived = time.monotonic()
        with self._one_scan:
            if self._began <= arrived:
                began = time.monotonic()
                self._found = self._scan()
                self._began = began
            found = self._found
        yield from found

    def _scan(self) -> list[GaugeMetricFamily]:
        try:
            infos = self._locks.list()
        except HoldfastError:
            return [_up(0.0)]
        return [*_filled(infos, time.time()), _up(1.0)]


def _up(value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily("holdfast_fleet_up", "1 if the store could be read", value)


def _families() -> list[GaugeMetricFamily]:
    return [
        GaugeMetricFamily(
            "holdfast_fleet_locks", "Holders and waiters in the store", labels=["kind", "state"]
        ),
        GaugeMetricFamily(
            "holdfast_fleet_oldest_hold_seconds", "Age of the oldest hold", labels=["kind"]
        ),
        GaugeMetricFamily(
            "holdfast_fleet_oldest_wait_seconds",
            "How long the longest waiter waits, without standbys of elections",
            labels=["kind"],
        ),
    ]


def _kind(info: LockInfo) -> str:
    """The kind as a label. Names that other programs wrote may hold bytes that are no text: one of
    them must not make all of the scrape fail."""
    return info.kind.encode(errors="backslashreplace").decode()


def _filled(infos: Sequence[LockInfo], now: float) -> list[GaugeMetricFamily]:
    shown = {kind for kind, _ in Tally(map(_kind, infos)).most_common(MOST_KINDS)}
    counts: dict[tuple[str, str], int] = {}
    holds: dict[str, float] = {}
    waits: dict[str, float] = {}
    for info in infos:
        kind = _kind(info)
        kind = kind if kind in shown else OTHER
        held, waiting = len(info.holders), sum(1 + waiter.behind for waiter in info.waiters)
        counts[kind, "held"] = counts.get((kind, "held"), 0) + held
        counts[kind, "waiting"] = counts.get((kind, "waiting"), 0) + waiting
        held_for = [now - holder.since for holder in info.holders]
        in_line = () if info.holders and is_election(info.kind) else info.waiters
        waited_for = [now - waiter.since for waiter in in_line]  # without standbys of a leader
        holds[kind] = max(holds.get(kind, 0.0), *held_for, 0.0)
        waits[kind] = max(waits.get(kind, 0.0), *waited_for, 0.0)
    locks, *families = _families()
    for labels, number in counts.items():
        locks.add_metric(labels, number)
    for family, ages in zip(families, (holds, waits), strict=True):
        for kind, age in ages.items():
            family.add_metric([kind], age)
    return [locks, *families]
