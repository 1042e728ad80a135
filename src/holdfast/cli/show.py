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
        info = locks.inspect(options.name)
    if options.json:
        print_json(as_plain_data(info))
    else:
        if info.holders:
            print_holders(info.holders)
        else:
            write(f"nobody holds {neutral(repr(options.name))}\n")
        if info.waiters:
            print_waiters(info.waiters)
        if info.notice:
            write(f"\nnotice: {neutral(info.notice)}\n")
    return 0 if info.holders or info.waiters else NOTHING
