"""``holdfast bench [URL]``: how fast a store of your own is, through both clients.

The cases are those of the project's own benchmarks, without peers. Safe beside production: all
names are in a namespace of their own, every case is bounded in time, processes and names, and
what was taken is given back. The counters of tokens stay: a week on Redis and SQLite, until their
rows are deleted on PostgreSQL and MySQL, which purge only namespaces that are in use.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

from holdfast.cli.exits import BAD_SETTING, NOTHING, Refused
from holdfast.cli.output.lock_info import print_json
from holdfast.cli.output.tables import print_table
from holdfast.cli.output.text import is_terminal, say
from holdfast.cli.parsing.options import Parser, connect, json_option, store_url

__all__ = ["main"]


def main(argv: list[str]) -> int:
    from holdfast.bench.own_plan import CASES

    parser = Parser("bench", "Measures a store: rate, waiting, fairness, renewal.")
    parser.add_argument("store", metavar="URL", nargs="?", help="else $HOLDFAST_URL, else local")
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        choices=CASES,
        metavar="CASE",
        help=f"only this: {', '.join(CASES)}; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds; rough figures")
    json_option(parser)
    options = parser.parse_args(argv)
    if not hasattr(os, "fork"):
        raise Refused("bench starts its processes by fork, which this system lacks", BAD_SETTING)
    url = store_url(options.store) or "local"
    namespace = f"holdfast-bench-{secrets.token_hex(4)}"
    _greet(url, namespace)
    results = _measure(url, namespace, options.case or list(CASES), options.quick)
    left = _left(url, namespace)
    if options.json:
        print_json({"namespace": namespace, "cases": results, "left_behind": left})
    else:
        _show(results)
    if left:
        say(f"left behind, until their ttl is over: {', '.join(left[:5])}")
    failed = any("error" in row for rows in results.values() for row in rows)
    return NOTHING if failed or left else 0


def _greet(url: str, namespace: str) -> None:
    """A store that can't be reached or used says so before anything is measured."""
    with connect(url, namespace) as locks:
        locks.check()
    if is_terminal(2):
        say(f"names are in the namespace {namespace}; other users of the store are not touched")
        say(
            "the tokens' counters of a few hundred names stay there: a week on Redis and SQLite, "
            "until their rows are deleted on PostgreSQL and MySQL"
        )


def _measure(url: str, namespace: str, cases: list[str], quick: bool) -> dict[str, Any]:
    from holdfast.bench.forkserver import ForkServer
    from holdfast.bench.own_plan import carry_out

    results = {}
    with ForkServer("holdfast.bench.own_book") as forkserver:
        for case in cases:
            if is_terminal(2):
                say(f"{case} …")
            results[case] = carry_out(case, url, namespace, forkserver, quick=quick)
    return results


def _left(url: str, namespace: str) -> list[str]:
    """Names that are still held or waited for: none, unless a case was killed."""
    with connect(url, namespace) as locks:
        return [info.name for info in locks.list()]


def _show(results: dict[str, Any]) -> None:
    from holdfast.bench.own_plan import CASES

    for number, (case, rows) in enumerate(results.items()):
        title, columns = CASES[case]
        print(f"{'' if number == 0 else chr(10)}{title}\n")
        lines = [
            [row["contender"], *(_cell(row, field) for field in columns.values())] for row in rows
        ]
        print_table(("", *columns), lines)
        for row in rows:
            for text in [row["error"]] if "error" in row else row.get("errors", []):
                print(f"{row['contender']}: {text}")


def _cell(row: dict[str, Any], field: str) -> str:
    value: Any = row
    for word in field.split("."):
        value = value.get(word) if isinstance(value, dict) else None
    if value is None:
        return "–"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
