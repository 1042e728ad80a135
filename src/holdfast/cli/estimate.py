"""``holdfast estimate``: what a lock will do to a fleet, from a simulation of its queue."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

from holdfast.cli.exits import BAD_SETTING, Refused
from holdfast.cli.output.lock_info import print_json
from holdfast.cli.output.text import is_terminal, say, terminal_columns, wrap, write
from holdfast.cli.parsing.options import Parser, connect, json_option, length, seconds, whole
from holdfast.cli.parsing.parser import wrong

if TYPE_CHECKING:
    from types import SimpleNamespace

    from holdfast.lab.estimate import Costs, Estimate

__all__ = ["main", "per_second"]

_PERIODS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
BARS = 10
"""Rows of the plot."""


def main(argv: list[str]) -> int:
    parser = Parser(
        "estimate",
        "Simulates a fleet that shares one name: how busy it is, how long requests wait, how many "
        "give up, what a crash costs, and what to do about it.",
    )
    parser.add_argument(
        "--rate", type=per_second, required=True, metavar="N/s", help="requests of all workers"
    )
    parser.add_argument(
        "--hold", type=length, required=True, metavar="TIME", help="how long each holds it"
    )
    parser.add_argument(
        "--workers", type=_workers, required=True, metavar="N", help="how many ask for it"
    )
    parser.add_argument("--ttl", type=length, default=30.0, metavar="TIME", help="of the lock (30)")
    parser.add_argument("--timeout", type=seconds, metavar="TIME", help="of each wait (none)")
    parser.add_argument("--slots", type=whole, default=1, metavar="N", help="a semaphore's (1)")
    parser.add_argument(
        "--store", metavar="NAME", help="take its measured costs: etcd, mysql-advisory, … (redis)"
    )
    parser.add_argument("--url", help="measure this store instead, for a few seconds")
    json_option(parser)
    options = parser.parse_args(argv)
    if options.store and options.url:
        parser.error("--store names a store, --url measures one: give one of them")
    found = _estimate(parser, options)
    if options.json:
        print_json(_plain(found))
    else:
        _show(found)
    return 0


def per_second(text: str) -> float:
    """A rate: 50, 50/s, 3000/m, 100000/h.

    >>> per_second("50"), per_second("3000/m")
    (50.0, 50.0)
    """
    number, _, unit = text.partition("/")
    try:
        rate = float(number) / _PERIODS[unit or "s"]
    except (ValueError, KeyError):
        rate = 0.0
    if not 0 < rate <= 1e6:
        raise wrong(f"{text!r} is no rate: requests per second, as in 50/s, 3000/m or 1000/h")
    return rate


def _workers(text: str) -> int:
    from holdfast.lab.estimate import MOST_WORKERS

    workers = whole(text)
    if workers > MOST_WORKERS:
        raise wrong(f"{text} workers are more than are simulated: {MOST_WORKERS:,} at the most")
    return workers


def _estimate(parser: Parser, options: SimpleNamespace) -> Estimate:
    from holdfast.lab.estimate import Load, costs_of, estimate

    timeout, slots = options.timeout, options.slots
    load = Load(options.rate, options.hold, options.workers, options.ttl, timeout, slots)
    if options.url:
        return estimate(load, _measure(options.url))
    try:
        return estimate(load, costs_of(options.store or "redis"))
    except ValueError as error:
        parser.error(str(error))


def _measure(url: str) -> Costs:
    """What the store costs here, by the cases of ``holdfast bench``."""
    if not hasattr(os, "fork"):
        raise Refused("measuring needs fork, which this system lacks: give --store", BAD_SETTING)
    from holdfast.bench.forkserver import ForkServer
    from holdfast.bench.own_plan import carry_out
    from holdfast.lab.estimate import Costs

    namespace = f"holdfast-bench-{secrets.token_hex(4)}"
    with connect(url, namespace) as locks:
        locks.check()
    if is_terminal(2):
        say(f"measuring, with names in the namespace {namespace} …")
    with ForkServer("holdfast.bench.own_book") as forkserver:
        free, contended = (
            carry_out(case, url, namespace, forkserver, quick=True)[0]
            for case in ("uncontended", "sixteen")
        )
    for row in (free, contended):
        if "error" in row:
            raise Refused(f"the store could not be measured: {row['error']}", BAD_SETTING)
    seconds_free, turn = free["free"]["p50_us"] / 1e6, contended["handover_p50_us"] / 1e6
    return Costs(seconds_free, turn, by_connection="mode=advisory" in url)


def _plain(found: Estimate) -> dict[str, Any]:
    return {
        "utilisation": found.utilisation,
        "demand": found.demand(),
        "holds_per_second": found.holds_per_second,
        "wait_p50_seconds": found.wait(0.5),
        "wait_p99_seconds": found.wait(0.99),
        "timed_out": found.timed_out,
        "crash_blocks_seconds": found.blocked_seconds,
        "crash_backlog": found.backlog,
        "crash_timed_out": found.crash_timed_out,
        "crash_drain_seconds": found.drain_seconds,
        "costs": {"free_seconds": found.costs.free, "turn_seconds": found.costs.turn},
        "advice": found.advice(),
    }


def _show(found: Estimate) -> None:
    load = found.load
    drained = "the line never gets shorter again"
    if found.drain_seconds is not None:
        drained = f"{_shown(found.drain_seconds)} later the line is empty"
    lost = "nobody gets the lock" if load.limit == 1 else "one slot is missing"
    gave_up = "" if load.timeout is None else f", and {found.crash_timed_out:,} have given up"
    rows = [
        ("utilisation", f"{found.utilisation:.1%} ({found.holds_per_second:,.1f} holds/s)"),
        ("wait", f"half below {_shown(found.wait(0.5))}, 99 % below {_shown(found.wait(0.99))}"),
        ("time out", "–" if load.timeout is None else f"{found.timed_out:.2%}"),
        ("after a crash", f"{lost} for up to {_shown(found.blocked_seconds)}"),
        ("", f"by then {found.backlog:,} wait{gave_up}; {drained}"),
    ]
    for name, text in rows:
        write(f"{name:<14}{text}\n")
    if is_terminal(1):
        _plot(found)
    write("\n")
    for line in wrap(found.advice(), terminal_columns()):
        write(f"{line}\n")


def _plot(found: Estimate) -> None:
    """How many wait how long: a bar for each range of waits, from nothing to the longest."""
    longest = found.wait(1.0)
    step = longest / BARS
    if step <= 0:
        return
    counts = [0] * BARS
    for wait in found.waits:
        counts[min(BARS - 1, int(wait / step))] += 1
    room = max(10, terminal_columns() - 30)
    write("\nwaits\n")
    for nth, many in enumerate(counts):
        bar = "█" * -(-many * room // max(counts))
        write(f"{'≤ ' + _shown((nth + 1) * step):>12} {bar} {many / len(found.waits):.1%}\n")


def _shown(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
