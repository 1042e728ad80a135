"""``holdfast break NAME --reason …``: ends somebody's hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cli.exits import NOTHING, Refused
from holdfast.cli.options import Parser, connect, json_option, store_options
from holdfast.cli.standing import print_holders, print_json
from holdfast.cli.text import is_terminal, neutral, write

if TYPE_CHECKING:
    from holdfast import Locks

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = Parser(
        "break",
        "Ends somebody's hold: they learn that it is lost, later holders get a higher token.\n"
        "What the old holder does meanwhile is only stopped by a fence at the resource.",
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--reason", metavar="TEXT", required=True, help="kept in the log")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask on a terminal")
    json_option(parser)
    store_options(parser)
    options = parser.parse_args(argv)
    if not options.reason.strip():
        parser.error("--reason needs some words")
    with connect(options.url, options.namespace) as locks:
        if not options.yes and not options.json and is_terminal(0) and is_terminal(1):
            _ask(locks, options.name)
        token = locks.break_lock(options.name, reason=options.reason)
    if options.json:
        print_json({"name": options.name, "token": token, "reason": options.reason})
    elif token is not None:
        write(f"ended the hold of {neutral(options.name)} with token {token}\n")
    else:
        raise Refused(f"nobody holds {options.name}", NOTHING)
    return 0 if token is not None else NOTHING


def _ask(locks: Locks, name: str) -> None:
    standing = locks.inspect(name)
    if not standing.holders:
        raise Refused(f"nobody holds {name}", NOTHING)
    print_holders(standing.holders)
    if input("end this hold? [y/N] ").strip().lower() not in ("y", "yes"):
        raise Refused("nothing was done", NOTHING)
