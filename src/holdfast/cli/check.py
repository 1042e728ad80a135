"""``holdfast check [URL]``: contacts a store and verifies what its guarantees rest on."""

from __future__ import annotations

from holdfast.cli.output.lock_info import print_json
from holdfast.cli.output.tables import print_table
from holdfast.cli.output.text import is_terminal, terminal_columns, wrap
from holdfast.cli.parsing.options import Parser, connect, json_option, store_options

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = Parser("check", "Contacts a store and verifies what its guarantees rest on.")
    parser.add_argument("store", metavar="URL", nargs="?", help="the same as --url")
    json_option(parser)
    store_options(parser)
    options = parser.parse_args(argv)
    with connect(options.store or options.url, options.namespace) as locks:
        findings = locks.check()
        guaranteed = sorted(map(str, locks.guarantees))
    if options.json:
        print_json({"guarantees": guaranteed, "findings": [f._asdict() for f in findings]})
    else:
        print_table(("", "LOOKED AT", "FOUND"), [(f.level, f.subject, f.detail) for f in findings])
        line = f"guarantees {', '.join(guaranteed)}"
        print("", *(wrap(line, terminal_columns()) if is_terminal(1) else [line]), sep="\n")
    return 0
