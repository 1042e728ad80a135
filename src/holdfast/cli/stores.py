"""``holdfast stores``: the stores side by side."""

from __future__ import annotations

from holdfast.cli.output.lock_info import print_json
from holdfast.cli.output.tables import print_table
from holdfast.cli.output.text import terminal_columns, wrap, write
from holdfast.cli.parsing.options import Parser, json_option

__all__ = ["main"]

EXPLANATION = (
    "ORDER: in which order waiters get the lock. ENDS WITH: what ends the lock of a dead process. "
    "MAY FAIL: how many of its servers may fail. FREE LOCK: the time to take and release a lock "
    "that nobody has. 16 PROCESSES: holds per second when so many want one lock. Both were "
    "measured on one machine; holdfast bench URL measures yours."
)


def main(argv: list[str]) -> int:
    parser = Parser("stores", "Compares the stores: what each promises, and how fast it is.")
    json_option(parser)
    options = parser.parse_args(argv)
    from holdfast.lab.stores import STORES

    if options.json:
        print_json([facts.as_plain_data() for facts in STORES])
        return 0
    rows = [
        (facts.url, facts.reach, facts.order, facts.ends_with, facts.survives, *facts.speed())
        for facts in STORES
    ]
    headings = ("URL", "REACHES", "ORDER", "ENDS WITH", "MAY FAIL", "FREE LOCK", "16 PROCESSES")
    print_table(headings, rows, spare=("REACHES", "ORDER"))
    write("\n")
    for line in wrap(EXPLANATION, terminal_columns()):
        write(f"{line}\n")
    return 0
