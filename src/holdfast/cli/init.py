"""``holdfast init URL``: marks a new deployment of a store as new."""

from __future__ import annotations

from holdfast.cli.output.text import neutral, write
from holdfast.cli.parsing.options import Parser, connect, store_options
from holdfast.core.drive import run_now

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = Parser(
        "init",
        "Marks a new deployment as new, so that loss protection does not wait for holds that may\n"
        "have been lost. Only where nobody can hold anything: a new or an emptied server.",
    )
    parser.add_argument("store", metavar="URL", nargs="?", help="the same as --url")
    store_options(parser)
    options = parser.parse_args(argv)
    with connect(options.store or options.url, options.namespace) as locks:
        # Few stores have anything to mark, so it is a word of theirs and not of the clients.
        initialise = getattr(locks._engine.backend, "initialise", None)
        done = "nothing to do: this store needs no mark"
        if initialise is not None:
            done = str(run_now(initialise()))
    write(f"{neutral(done)}\n")
    return 0
