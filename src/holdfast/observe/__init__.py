"""See what locks do: events, for the log, for OpenTelemetry, for Prometheus, for your own code.

>>> import holdfast
>>> from holdfast import observe
>>> class Slow(observe.Observer):
...     def acquired(self, event: observe.Acquired) -> None:
...         print(event.kind, event.contended)
>>> with holdfast.connect("memory://observe", observers=[Slow()]) as locks:
...     with locks.lock("order:42"):
...         print(observe.current().name)
order False
order:42

``HOLDFAST_OBSERVE=logging,opentelemetry,prometheus`` adds these three without code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.events import (
    Acquired,
    Broken,
    Cancelled,
    Doubtful,
    FenceRefused,
    Leading,
    LockEvent,
    LockUse,
    Lost,
    Observer,
    Ran,
    Reachable,
    Released,
    Renewed,
    Requested,
    StoreEvent,
    TimedOut,
    Unreachable,
    WaitBegan,
    current,
    installed,
)

if TYPE_CHECKING:
    from holdfast.observe.logging import LockFilter, Logging, structlog_context
    from holdfast.observe.opentelemetry import OpenTelemetry
    from holdfast.observe.prometheus import FleetCollector, Prometheus

__all__ = [
    "Acquired",
    "Broken",
    "Cancelled",
    "Doubtful",
    "FenceRefused",
    "FleetCollector",
    "Leading",
    "LockEvent",
    "LockFilter",
    "LockUse",
    "Logging",
    "Lost",
    "Observer",
    "OpenTelemetry",
    "Prometheus",
    "Ran",
    "Reachable",
    "Released",
    "Renewed",
    "Requested",
    "StoreEvent",
    "TimedOut",
    "Unreachable",
    "WaitBegan",
    "current",
    "install",
    "structlog_context",
    "uninstall",
]

# Imported at their first use: they need packages that not everybody has.
_HOMES = {
    "LockFilter": "holdfast.observe.logging",
    "Logging": "holdfast.observe.logging",
    "FleetCollector": "holdfast.observe.prometheus",
    "OpenTelemetry": "holdfast.observe.opentelemetry",
    "Prometheus": "holdfast.observe.prometheus",
    "structlog_context": "holdfast.observe.logging",
}


def install(observer: Observer) -> None:
    """Makes it an observer of every client that this process makes from now on."""
    if observer not in installed:
        installed.append(observer)


def uninstall(observer: Observer) -> None:
    """Ends ``install``. Clients that exist keep the observer."""
    if observer in installed:
        installed.remove(observer)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.observe' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
