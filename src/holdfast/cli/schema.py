"""``holdfast schema postgresql|mysql``: the SQL that a database store needs, for a DBA to run."""

from __future__ import annotations

import importlib

from holdfast.cli.output.text import write
from holdfast.cli.parsing.options import Parser
from holdfast.url import BACKENDS

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = Parser(
        "schema",
        "Prints the SQL that a database store needs; running it again changes nothing.\n"
        "Holdfast runs it by itself where its account may create tables.",
    )
    parser.add_argument("store", choices=("postgresql", "mysql"))
    parser.add_argument("--schema", metavar="NAME", help="the schema to use (postgresql)")
    parser.add_argument("--prefix", metavar="TEXT", help="how the tables' names begin")
    options = parser.parse_args(argv)
    if options.schema and options.store != "postgresql":
        parser.error("--schema is for postgresql; use a database of its own, or --prefix")
    home = {"postgresql": "schema", "mysql": "sql"}[options.store]
    module = importlib.import_module(f"{BACKENDS[options.store][0]}.{home}")
    given = {"schema": options.schema, "prefix": options.prefix}
    sql = str(module.schema_sql(**{word: text for word, text in given.items() if text}))
    write(sql if sql.endswith("\n") else f"{sql}\n")
    return 0
