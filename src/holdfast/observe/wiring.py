"""Which observers a client has: its own, those of the process, those that the environment names."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from holdfast.core.events import Events, Observer, installed
from holdfast.io.threads import deliveries
from holdfast.observe.logging import Logging

if TYPE_CHECKING:
    from holdfast.core.engine import Engine

__all__ = ["events_of", "log_events_of"]

NAMED = {
    "logging": ("holdfast.observe.logging", "Logging"),
    "opentelemetry": ("holdfast.observe.opentelemetry", "OpenTelemetry"),
    "prometheus": ("holdfast.observe.prometheus", "Prometheus"),
}
"""The words of ``HOLDFAST_OBSERVE``."""
_made: dict[str, Observer] = {}
"""Observers that the environment named: one of each for all clients of the process."""


def events_of(engine: Engine, observers: Iterable[Observer], named: str) -> Events | None:
    """What tells the observers of a client; ``None`` if it has none.

    Raises ``TypeError`` for what is no observer, ``ValueError`` for an unknown word in
    ``HOLDFAST_OBSERVE``, ``ImportError`` with the command to type if a package is missing.
    """
    own = list(observers)
    for observer in own:
        if not isinstance(observer, Observer):
            raise TypeError(
                f"observers are objects of holdfast.observe.Observer, not {observer!r:.60}"
            )
    words = [word.strip() for word in named.split(",") if word.strip()]
    everyone = [*own, *installed, *(_named(word) for word in words)]
    kinds = {type(observer) for observer in own}
    # What the program made itself goes before one of the same type that the process has.
    unique = {id(each): each for each in everyone if each in own or type(each) not in kinds}
    return _events(engine, list(unique.values())) if unique else None


def log_events_of(engine: Engine) -> Events:
    """For a client without observers, while the log is at DEBUG."""
    return _events(engine, [])


def _events(engine: Engine, observers: list[Observer]) -> Events:
    if not any(isinstance(observer, Logging) for observer in observers):
        observers.append(_debug)
    return Events(observers, engine.store.display, engine.runtime.now, deliveries.call, _prepare)


_debug = Logging("DEBUG")
"""The log of clients that have no ``Logging`` of their own."""


def _prepare() -> None:
    with suppress(RuntimeError):  # no more threads: events wait, and are dropped in the end
        deliveries.prepare()


def _named(word: str) -> Observer:
    if word not in NAMED:
        known = ", ".join(NAMED)
        raise ValueError(f"HOLDFAST_OBSERVE has {word!r:.40}; known are {known}")
    if word not in _made:
        module, name = NAMED[word]
        _made[word] = getattr(import_module(module), name)()
    return _made[word]
