"""The table of guarantees, frozen: a store fails the suite if it declares less or more than its
row here.

A test is skipped for a store of this table only because of what the table says.
"""

from __future__ import annotations

from holdfast.core.contract import Guarantee, HandingOver, Settings
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.testing.harness import Harness, Knob
from holdfast.url import open_store

__all__ = [
    "GUARANTEES",
    "HAND_OVER",
    "KNOBS",
    "NEEDS_MAJORITY",
    "expected_guarantees",
    "expected_knobs",
    "guarantees_of",
    "hands_over",
    "row_of",
]

_ALL_MODES = frozenset(
    {Guarantee.EXCLUSIVE, Guarantee.SHARED, Guarantee.SLOTS, Guarantee.FENCED, Guarantee.RECORDS}
)
_IN_LINE = _ALL_MODES | {Guarantee.FIFO}
_ACROSS_HOSTS = _IN_LINE | {Guarantee.CROSS_HOST}
_QUORUM = _ACROSS_HOSTS | {Guarantee.SURVIVES_SERVER_LOSS}
_WATCHED = _QUORUM | {Guarantee.WATCH}

GUARANTEES: dict[str, frozenset[Guarantee]] = {
    "memory": _IN_LINE,
    "sqlite": _IN_LINE,
    "redis": _ACROSS_HOSTS,
    "redlock": _QUORUM - {Guarantee.FIFO, Guarantee.RECORDS},
    "zookeeper": _WATCHED,
    "etcd": _WATCHED,
    "consul": _WATCHED,
    "postgres": _ACROSS_HOSTS,
    "postgres-advisory": _ACROSS_HOSTS - {Guarantee.FIFO},
    "mysql": _ACROSS_HOSTS,
    "mysql-advisory": _ACROSS_HOSTS - {Guarantee.FIFO, Guarantee.SHARED},
}

HAND_OVER = frozenset(GUARANTEES) - {"postgres-advisory", "mysql-advisory"}
"""The stores that hand a lease over to another process; the others say ``Unsupported``."""
NEEDS_MAJORITY = frozenset({"redlock"})
"""Of these, the stores where takers at the same time may divide the servers among them: then none
of them gets the hold."""

_NO_KNOBS: frozenset[Knob] = frozenset()
_ALL_KNOBS = frozenset(Knob)

KNOBS: dict[str, frozenset[Knob]] = {
    # The embedded stores have no server and no connection that could break; but a process may
    # stop with the file's write lock in its hand.
    **dict.fromkeys(GUARANTEES, _ALL_KNOBS),
    "memory": _NO_KNOBS,
    "sqlite": frozenset({Knob.PAUSE}),
}


def row_of(harness: Harness) -> str:
    """By which name the tables know the store, if they do."""
    return harness.repeats or harness.name


def expected_guarantees(harness: Harness, declared: frozenset[Guarantee]) -> frozenset[Guarantee]:
    """What the store must declare: its row; for a third-party store what it declares."""
    return GUARANTEES.get(row_of(harness), declared)


def guarantees_of(harness: Harness) -> frozenset[Guarantee]:
    """By what the suite decides which rules apply to a running store."""
    row = GUARANTEES.get(row_of(harness))
    return open_store(harness.url, Settings()).guarantees if row is None else row


def hands_over(harness: Harness) -> bool:
    """Whether a lease can be handed over: its row; for a third-party store what it has."""
    if row_of(harness) in GUARANTEES:
        return row_of(harness) in HAND_OVER
    backend = open_store(harness.url, Settings()).backend(BlockingRuntime())
    return isinstance(backend, HandingOver)


def expected_knobs(harness: Harness) -> frozenset[Knob]:
    """The faults that the harness must be able to cause."""
    return KNOBS.get(row_of(harness), harness.knobs)
