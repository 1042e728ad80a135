"""``holdfast fence enter RESOURCE FENCE``: carries a fence to a resource."""

from __future__ import annotations

from holdfast.cli.exits import NOTHING, Refused
from holdfast.cli.output.text import neutral, write
from holdfast.cli.parsing.options import Parser, connect, fence_keys, store_options

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = Parser(
        "fence",
        "Lets a fence enter a resource, so that every lower one is refused there from now on.\n"
        "With --broken it is the fence of a hold that was broken, and is itself refused: the\n"
        "lock need not be taken first. Later fences are accepted.\n\n"
        "RESOURCE is postgresql://…#name, mysql://…#name, sqlite:///file#name, redis://…#name,\n"
        "a file's path, or gate:name (a gate on the store of --url).",
        "holdfast fence enter RESOURCE FENCE [options]",
    )
    parser.add_argument("word", metavar="enter", choices=("enter",))
    parser.add_argument("resource", metavar="RESOURCE", help="where it is, and its name")
    parser.add_argument("fence", metavar="FENCE", help="as in $HOLDFAST_FENCE, or as break prints")
    parser.add_argument("--broken", action="store_true", help="this very fence is refused, too")
    parser.add_argument(
        "--table", metavar="NAME", default="holdfast_fence", help="the table of fences, in SQL"
    )
    store_options(parser)
    options = parser.parse_args(argv)

    from holdfast.claim import Fence, Mode
    from holdfast.errors import StaleFence, UntrustedFence
    from holdfast.fencing.address import enter_at

    keys = fence_keys()
    try:
        fence = Fence.parse(options.fence, keys)
    except UntrustedFence as error:
        raise Refused(str(error), NOTHING) from None
    if options.broken:
        # The next number: no other hold has it yet, and every later one has it or a higher one.
        # Readers are refused below the highest writer only.
        mode = Mode.EXCLUSIVE if fence.mode is Mode.SHARED else fence.mode
        fence = keys.sign(Fence(fence.name, mode, fence.slots, fence.epoch, fence.token + 1))
    try:
        enter_at(
            options.resource,
            fence,
            table=options.table,
            open_client=lambda: connect(options.url, options.namespace),
        )
    except StaleFence as error:
        raise Refused(str(error), NOTHING) from error
    write(f"{neutral(repr(fence.name))} entered with token {fence.token}: lower ones are refused\n")
    return 0
