"""``python -m benchmarks [--only STORE] [--quick]``: prints the tables that ``docs`` quotes."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from benchmarks.contended import contend
from benchmarks.contenders import CONTENDERS
from benchmarks.uncontended import Row, measure, pinned
from servers.redis import RedisServer

STORES = ("sqlite", "redis")


@contextmanager
def _served(store: str) -> Iterator[tuple[str, int | None]]:
    """The URL of a store of our own, and its server's process."""
    if store == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite://{folder}/locks.db", None
    else:
        with RedisServer() as server:
            yield server.url, server.pid


def _tell(title: str, rows: list[Row]) -> None:
    limit = next(row for row in rows if row.contender.limit)
    print(f"\n{title}\n\n| contender | holds/s | ÷ limit | client CPU µs |\n|---|---|---|---|")
    for row in rows:
        ratio = row.per_second / limit.per_second
        mark = " **(limit)**" if row.contender.limit else ""
        print(
            f"| {row.contender.name}{mark} | {row.per_second:,.0f} | {ratio:.2f} "
            f"| {row.cpu_microseconds:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--only", choices=STORES, action="append", help="these stores alone")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, shorter runs")
    words = parser.parse_args()
    rounds, seconds = (5, 3.0) if words.quick else (25, 10.0)
    for store in words.only or STORES:
        contenders = [one for one in CONTENDERS if one.store == store]
        with _served(store) as (url, pid):
            with pinned(pid):
                _tell(f"{store}: uncontended, pinned", measure(contenders, url, rounds))
            _tell(f"{store}: uncontended, free", measure(contenders, url, rounds))
            seen = contend(url, seconds=seconds)
            print(
                f"\n{store}: 16 processes on one lock, 1 ms holds: {seen.per_second:,.0f} holds/s, "
                f"fewest/most {seen.fewest_to_most:.2f}, longest wait "
                f"{seen.longest_wait * 1000:.0f} ms, {len(seen.faults)} faults"
            )


if __name__ == "__main__":
    main()
