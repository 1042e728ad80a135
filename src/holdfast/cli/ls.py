"""``holdfast ls [PREFIX]``: the names that are held or waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cli.output.lock_info import as_plain_data, mode, print_json, waiting
from holdfast.cli.output.tables import print_table
from holdfast.cli.output.text import duration, is_terminal, say, since
from holdfast.cli.parsing.options import Parser, connect, json_option, store_options
from holdfast.url import BACKENDS

if TYPE_CHECKING:
    from holdfast import LockInfo

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = Parser("ls", "Lists the names that are held or waited for.")
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="how names begin")
    json_option(parser)
    store_options(parser)
    options = parser.parse_args(argv)
    if options.prefix.partition("://")[0] in BACKENDS and not options.url:
        parser.error("PREFIX is how names begin; a store's URL is given with --url")
    with connect(options.url, options.namespace) as locks:
        infos = locks.list(options.prefix)
    if options.json:
        print_json([as_plain_data(info) for info in infos])
    elif infos:
        rows = [row for info in infos for row in _rows(info)]
        headings = ("NAME", "HELD BY", "MODE", "TOKEN", "SINCE", "LEFT", "WAITING", "NOTE")
        print_table(headings, rows, spare=("TOKEN", "MODE"))
    elif is_terminal(2):
        say("nothing is held or waited for")
    return 0


def _rows(info: LockInfo) -> list[tuple[str, ...]]:
    """One row for each holder; those who wait are counted in the first. What the store has to say
    about the name is the note of a row without a holder."""
    queue = str(waiting(info) or "")
    notice = f"notice: {info.notice}" if info.notice else ""
    if not info.holders:
        who = "nobody" if info.waiters else "?"  # it is listed because it can't be read
        return [(info.name, who, "", "", "", "", queue, notice)]
    rows: list[tuple[str, ...]] = [
        (
            "" if nth else info.name,
            f"{holder.host} pid {holder.pid}",
            mode(holder),
            str(holder.token),
            since(holder.since),
            duration(holder.remaining),
            "" if nth else queue,
            holder.note,
        )
        for nth, holder in enumerate(info.holders)
    ]
    return rows + [("", "", "", "", "", "", "", notice)] * bool(notice)
