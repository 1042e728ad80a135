"""``python -m benchmarks``: measures, writes JSON, a Markdown report and plots."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.book import STORES
from benchmarks.plan import CASES, plan, sizes
from benchmarks.progress import Progress
from benchmarks.report import publish, write_report
from benchmarks.results import load, save, write_all
from benchmarks.run import carry_out
from benchmarks.stores import served
from holdfast.bench.forkserver import ForkServer

__all__ = ["main"]

DEFAULT_FOLDER = Path("build/benchmarks")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    words = [*CASES, "growth"]
    parser.add_argument("--only", metavar="STORE", choices=STORES, action="append", default=[])
    parser.add_argument("--case", choices=words, action="append", default=[])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes; rough figures")
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER, help="the folder of results")
    parser.add_argument(
        "--report", action="store_true", help="only write the report of what is in the folder"
    )
    parser.add_argument(
        "--docs", action="store_true", help="put report and plots into docs/benchmarks.md"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    if not options.report:
        _measure(options.only, options.case, options.quick, options.out)
    results = load(options.out)
    write_all(options.out, results)
    print(write_report(options.out, results))
    if options.docs:
        publish(options.out)


def _measure(only: list[str], cases: list[str], quick: bool, folder: Path) -> None:
    size = sizes(quick)
    steps = plan(only, cases, size)
    progress = Progress(len(steps))
    for store, group in groupby(steps, key=lambda step: step.store):
        with served(store) as target, ForkServer("benchmarks.book") as forkserver:
            for step in group:
                progress.begin(f"{store}: {CASES[step.case]}")
                rows = carry_out(step, size, target, forkserver, progress.tick)
                save(folder, step.name, rows, quick=quick)
                progress.end()


if __name__ == "__main__":
    main()
