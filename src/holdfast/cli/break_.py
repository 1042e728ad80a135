"""``holdfast break NAME --reason …``: ends the hold of another client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cli.exits import NOTHING, Refused
from holdfast.cli.output.lock_info import print_holders, print_json
from holdfast.cli.output.text import is_terminal, neutral, write
from holdfast.cli.parsing.options import (
    Parser,
    connect,
    epoch_option,
    fence_keys,
    json_option,
    store_options,
)

if TYPE_CHECKING:
    from holdfast import Holder, Locks

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = Parser(
        "break",
        "Ends the hold of another client: it learns of the loss; later tokens are higher.\n"
        "Only a fence at the resource stops what the old holder still does.",
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--reason", metavar="TEXT", required=True, help="why; told to the holder")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask on a terminal")
    json_option(parser)
    epoch_option(parser)
    store_options(parser)
    options = parser.parse_args(argv)
    if not options.reason.strip():
        parser.error("--reason needs some words")
    with connect(options.url, options.namespace) as locks:
        if not options.yes and not options.json and is_terminal(0) and is_terminal(1):
            _ask(locks, options.name)
        holders = locks.inspect(options.name).holders
        token = locks.break_lock(options.name, reason=options.reason)
    fences = _fences(options.name, holders, options.epoch or 0) if token is not None else []
    if options.json:
        summary = {"name": options.name, "token": token, "reason": options.reason, "fences": fences}
        print_json(summary)
    elif token is not None:
        write(f"{neutral(_told(options.name, holders, token, options.reason))}\n")
        for fence in fences:
            write(f"its fence, for `holdfast fence enter --broken RESOURCE`: '{fence}'\n")
    else:
        raise Refused(f"nobody holds {options.name!r}", NOTHING)
    return 0 if token is not None else NOTHING


def _told(name: str, holders: tuple[Holder, ...], token: int, reason: str) -> str:
    """One line that is worth keeping: whose hold was ended, and why."""
    held_by = "; ".join(str(holder) for holder in holders) or "unknown"
    return f"ended the hold of {name!r} with token {token}, held by {held_by}: {reason}"


def _fences(name: str, holders: tuple[Holder, ...], epoch: int) -> list[str]:
    """Of an epoch that the store does not know: a deployment that has one says so itself."""
    from holdfast.claim import Fence

    broken = [Fence(name, who.mode, who.slots, epoch, who.token) for who in holders]
    return [str(fence_keys().sign(fence)) for fence in broken]


def _ask(locks: Locks, name: str) -> None:
    info = locks.inspect(name)
    if not info.holders:
        raise Refused(f"nobody holds {name!r}", NOTHING)
    print_holders(info.holders)
    try:
        answer = input("end this hold? [y/N] ")
    except EOFError:  # Ctrl-D
        answer = ""
        write("\n")
    if answer.strip().lower() not in ("y", "yes"):
        raise Refused("nothing was done", NOTHING)
