"""The book of ``holdfast bench``: Holdfast's two clients, nobody else."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.bench.contender import Contender, ours

__all__ = ["contenders", "request_counter"]

STORE = "store"


def contenders() -> list[Contender]:
    return ours(STORE)


def request_counter(*_: str) -> Callable[[], float] | None:
    """Other programs may use the store: its counters say nothing about this run."""
    return None
