"""Carries out one step: asks the fork server for each contender in turn, and gathers the rows."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.plan import (
    HOLD_SECONDS,
    LOCKS,
    PAUSE_SECONDS,
    PROCESSES,
    REDLOCK_STATES,
    Size,
    Step,
    growth,
)
from benchmarks.stores import Served
from benchmarks.tape import Relay
from holdfast.bench.contender import HELD_TTL_SECONDS, Contender
from holdfast.bench.forkserver import ForkServer

__all__ = ["carry_out"]

MOST_COUNTED = 10_000
"""More leases than this are taken without a relay, which would be slower than the store."""

Tick = Callable[[str], None]
Row = dict[str, Any]


def carry_out(
    step: Step, size: Size, store: Served, forkserver: ForkServer, tick: Tick
) -> list[Row]:
    """The rows of one case on one store."""
    if step.case == "uncontended":
        return _uncontended(step, size, store, forkserver, tick)
    if step.case in PROCESSES:
        return _contended(step, size, store, forkserver, tick)
    if step.case == "redlock":
        return _redlock(step, size, store, forkserver, tick)
    if step.case.startswith("growth"):
        return _growth(step, size, store, forkserver, tick)
    if step.case == "drain":
        return _in_turns(
            step.players,
            1,
            size.drain_rounds,
            tick,
            lambda one: _drain(one, size, store, forkserver),
        )
    return _in_turns(step.players, 1, 1, tick, lambda one: _held(one, size, store, forkserver))


def _head(one: Contender) -> Row:
    return {"contender": one.name, "store": one.store, "role": one.role, "flavour": one.flavour}


def _uncontended(
    step: Step, size: Size, store: Served, forkserver: ForkServer, tick: Tick
) -> list[Row]:
    tick("all, in turns")
    keys = [one.key for one in step.players]
    allowed = 30 + len(keys) * (2 * size.rounds * size.slice_seconds * 1.5 + 10)
    rows: Any = forkserver.run(
        "uncontended",
        allowed=allowed,
        contenders=keys,
        target=store.aim(),
        rounds=size.rounds,
        slice_seconds=size.slice_seconds,
    )
    if isinstance(rows, dict):
        return [_head(one) | rows for one in step.players]
    counts: Row = {}
    if store.nodes:
        counts = forkserver.run("requests", allowed=60, contenders=keys, target=store.aim())
    for row in rows:
        row["requests"] = counts.get(row["contender"])
    order = {one.name: number for number, one in enumerate(step.players)}
    return sorted(rows, key=lambda row: order[row["contender"]])


def _in_turns(
    players: list[Contender],
    rounds: int,
    compared: int,
    tick: Tick,
    play: Callable[[Contender], Row],
) -> list[Row]:
    """Rounds in which everybody has a short turn; what is reported is the middle of them. Who is
    ``compared``, ourselves and our limits, has so many."""
    seen: dict[str, list[Row]] = {one.name: [] for one in players}
    ours = [one for one in players if one.role in ("ours", "limit")]
    for number in range(max(rounds, compared)):
        turns = players if number < rounds else ours
        for one in random.sample(turns, len(turns)):
            tick(one.name)
            seen[one.name].append(play(one))
    return [_head(one) | _merged(seen[one.name]) for one in players]


def _contended(
    step: Step, size: Size, store: Served, forkserver: ForkServer, tick: Tick
) -> list[Row]:
    def play(one: Contender) -> Row:
        answer: Row = forkserver.run(
            "contended",
            allowed=size.contended_seconds + 40,
            contender=one.key,
            target=store.aim(),
            processes=PROCESSES[step.case],
            seconds=size.contended_seconds,
            hold_seconds=HOLD_SECONDS,
            pause_seconds=PAUSE_SECONDS.get(step.case, 0.0),
            locks=LOCKS.get(step.case, 1),
        )
        return answer

    compared = size.compared_rounds if step.case == "sixteen" else 0
    return _in_turns(step.players, size.contended_rounds, compared, tick, play)


_WORST = ("longest_wait_ms", "longest_ms", "hung")
_SUMS = ("overlaps", "sinking_tokens", "holds", "acquires", "errors")
_OF_ALL = ("fewest", "most", "fewest_to_most")
"""What is told of all rounds together, by ``_fairness``."""


def _merged(rounds: list[Row]) -> Row:
    good = [row for row in rounds if not row.get("error")]
    if not good:
        return rounds[0]
    merged: Row = {}
    for field in dict.fromkeys(field for row in good for field in row):
        values = [row[field] for row in good if row.get(field) is not None]
        if field == "counts":
            merged |= _fairness(values)
        elif field not in _OF_ALL:
            merged[field] = _one_of(field, values)
        if field == "longest_wait_ms":
            merged[f"usual_{field}"] = statistics.median(values)
    return merged


def _one_of(field: str, values: list[Any]) -> Any:
    if not values:
        return None
    if isinstance(values[0], list):
        return sorted({text for texts in values for text in texts})
    if field in _WORST or isinstance(values[0], str):
        return max(values)
    return sum(values) if field in _SUMS else statistics.median(values)


def _fairness(counts: list[list[int]]) -> Row:
    """Over all rounds: a slow store makes few holds in one, and a few are never shared evenly."""
    each = [sum(process) for process in zip(*counts, strict=True)]
    return {"fewest": min(each), "most": max(each), "fewest_to_most": min(each) / max(*each, 1)}


def _drain(one: Contender, size: Size, store: Served, forkserver: ForkServer) -> Row:
    waiters = 200 if one.flavour == "blocking" else 1000
    answer: Row = forkserver.run(
        "drain",
        allowed=size.drain_limit_seconds + 2 * size.settle_seconds + 30,
        contender=one.key,
        target=store.aim(),
        waiters=waiters,
        settle_seconds=size.settle_seconds,
        idle_seconds=size.settle_seconds,
        limit_seconds=size.drain_limit_seconds,
    )
    return answer


def _held(one: Contender, size: Size, store: Served, forkserver: ForkServer) -> Row:
    url, pids, namespace = store.aim()
    counted = bool(store.nodes) and size.leases <= MOST_COUNTED
    relay = Relay(url) if counted else None
    answer: Row = forkserver.run(
        "held",
        allowed=size.watch_seconds + 300,  # to take and to give back 100,000
        contender=one.key,
        target=[relay.url if relay else url, pids, namespace],
        leases=size.leases,
        seconds=size.watch_seconds,
    )
    if relay is not None:
        if "error" not in answer:
            sent = relay.batches(answer["since"] + 0.1, answer["until"])
            span = answer["until"] - answer["since"]
            answer["batches_per_interval"] = sent / span * HELD_TTL_SECONDS / 3
        relay.close()
    return answer


def _redlock(
    step: Step, size: Size, store: Served, forkserver: ForkServer, tick: Tick
) -> list[Row]:
    def play(state: str, one: Contender) -> Row:
        answer: Row = forkserver.run(
            "redlock",
            allowed=size.redlock_seconds + 12,
            contender=one.key,
            target=store.aim(),
            state=state,
            seconds=size.redlock_seconds,
        )
        store.mend()
        return answer

    return [
        row | {"state": state}
        for state in REDLOCK_STATES
        for row in _in_turns(step.players, 1, size.redlock_rounds, tick, partial(play, state))
    ]


def _growth(step: Step, size: Size, store: Served, forkserver: ForkServer, tick: Tick) -> list[Row]:
    rows = []
    for one in step.players:
        for number in growth(step.case, step.store, size):
            tick(f"{one.name}, {number:,}")
            if step.case == "growth-leases":
                answer = _held(one, size._replace(leases=number), store, forkserver)
            else:
                answer = forkserver.run(
                    "growth",
                    allowed=150,
                    contender=one.key,
                    target=store.aim(),
                    what=step.case.removeprefix("growth-"),
                    size=number,
                )
            rows.append(_head(one) | {"size": number} | answer)
    return rows
