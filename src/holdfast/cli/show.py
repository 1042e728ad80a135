"""``holdfast show NAME``: the holders and waiters of a name."""

from __future__ import annotations

from holdfast.cli.exits import NOTHING
from holdfast.cli.output.lock_info import as_plain_data, print_holders, print_json, print_waiters
from holdfast.cli.output.text import neutral, write
from holdfast.cli.parsing.options import Parser, connect, json_option, store_options

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = Parser("show", "Shows the holders and waiters of a name; exit 1 if there are none.")
    parser.add_argument("name", metavar="NAME")
    json_option(parser)
    store_options(parser)
    options = parser.parse_args(argv)
    with connect(options.url, options.namespace) as locks:
        standing = locks.inspect(options.name)
    if options.json:
        print_json(as_plain_data(standing))
    else:
        if standing.holders:
            print_holders(standing.holders)
        else:
            write(f"nobody holds {neutral(options.name)}\n")
        if standing.waiters:
            print_waiters(standing.waiters)
        if standing.notice:
            write(f"\nnotice: {neutral(standing.notice)}\n")
    return 0 if standing.holders or standing.waiters else NOTHING
