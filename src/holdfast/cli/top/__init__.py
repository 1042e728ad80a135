"""``holdfast top``: a store live on the terminal."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from holdfast.cli.exits import USAGE, BadSetting, Refused
from holdfast.cli.output.lock_info import as_plain_data, print_json
from holdfast.cli.output.tables import print_table
from holdfast.cli.output.text import duration, is_terminal, neutral
from holdfast.cli.parsing.options import Parser, connect, json_option, store_options
from holdfast.dashboard.rows import SORTS, Row, matching, store_of

if TYPE_CHECKING:
    from holdfast import Locks
    from holdfast.cli.top.screen import Screen
    from holdfast.cli.top.terminal import Terminal
    from holdfast.dashboard.reader import ReaderThread

__all__ = ["main"]

LONGEST_ASKED = 40
"""Characters of a name in a question."""
LONGEST_TYPED = 200
"""Characters of a filter or a reason: a holder is not told more."""
REDRAW_SECONDS = 1.0
"""The ages on the screen grow, also without news."""


def main(argv: list[str]) -> int:
    parser = Parser(
        "top",
        "Shows a store live: what waits longest comes first. Press ? for the keys, q to quit.\n"
        "Needs the extra: pip install 'holdfast[cli]' (not for --once).",
    )
    parser.add_argument("--once", action="store_true", help="print one table and end, for scripts")
    json_option(parser)
    parser.add_argument(
        "--sort", metavar="WORD", help=f"what comes first: {', '.join(SORTS)} (wait)"
    )
    parser.add_argument(
        "--filter", metavar="TEXT", help="only rows with TEXT in name, host, pid or note"
    )
    store_options(parser)
    options = parser.parse_args(argv)
    sort, text = options.sort or "wait", options.filter or ""
    if sort not in SORTS:
        parser.error(f"--sort {sort!r}: one of {', '.join(SORTS)}")
    once = options.once or options.json
    if not once and not (is_terminal(0) and is_terminal(1)):
        raise Refused("top needs a terminal; --once prints one table for scripts", USAGE)
    if not once and os.environ.get("TERM") == "dumb":
        raise Refused("top can't draw on this terminal, TERM is dumb; --once prints a table", USAGE)
    with connect(options.url, options.namespace) as locks:
        if once:
            _print(locks, sort, text, options.json)
        else:
            _live(locks, sort, text)
    return 0


def _print(locks: Locks, sort: str, text: str, as_json: bool) -> None:
    """One reading, for scripts; fails as ``ls`` does where the store can't be read."""
    from holdfast.dashboard.watch import MOST_NAMES, Watch

    watch = Watch()
    watch.read(locks.list(limit=MOST_NAMES + 1), watch.time())
    rows = sorted(matching(watch.rows, text), key=SORTS[sort])
    if as_json:
        print_json([_plain(row) for row in rows])
        return
    headings = ("NAME", "WAIT", "LINE", "HELD BY", "HELD", "LEFT", "NOTE")
    print_table(headings, [_cells(row) for row in rows], spare=("LEFT", "HELD"))


def _plain(row: Row) -> dict[str, object]:
    waits = {"wait_seconds": row.wait_seconds, "hold_seconds": row.hold_seconds}
    return {**as_plain_data(row.info), "kind": row.kind, "waiting": row.waiting, **waits}


def _cells(row: Row) -> tuple[str, ...]:
    holders = row.info.holders
    more = f" +{len(holders) - 1}" if len(holders) > 1 else ""
    return (
        row.name,
        duration(row.wait_seconds) if row.wait_seconds else "",
        str(row.waiting or ""),
        f"{holders[0].host} pid {holders[0].pid}{more}" if holders else "nobody",
        duration(row.hold_seconds) if holders else "",
        duration(row.left_seconds) if holders else "",
        holders[0].note if holders else "",
    )


def _live(locks: Locks, sort: str, text: str) -> None:
    try:
        from holdfast.cli.top.screen import Screen
        from holdfast.cli.top.terminal import Terminal
    except ModuleNotFoundError as error:
        raise BadSetting(_missing(error)) from None
    from holdfast.dashboard.reader import ReaderThread

    logging.getLogger("holdfast").addHandler(logging.NullHandler())  # lines would spoil the screen
    with Terminal() as terminal:
        reader = ReaderThread(locks, terminal.wake)
        screen = Screen(reader.watch, store_of(locks))
        screen.sort, screen.filter = sort, text
        reader.start()
        try:
            _Session(terminal, screen, reader).run()
        finally:
            reader.stop()


def _missing(error: ModuleNotFoundError) -> str:
    if error.name == "termios":
        return "top needs a terminal of Linux or macOS; --once works everywhere"
    from holdfast.dashboard import missing_extra

    return str(missing_extra(error, "cli"))


def _short(text: str) -> str:
    """The beginning and the end of a name, for a question: a long one would leave no room for the
    question itself, and could ask another one."""
    shown = neutral(text)
    return shown if len(shown) <= LONGEST_ASKED else f"{shown[:24]}…{shown[-15:]}"


class _Session:
    """What keys do."""

    def __init__(self, terminal: Terminal, screen: Screen, reader: ReaderThread) -> None:
        self._terminal, self._screen, self._reader = terminal, screen, reader
        self._asks = ""
        """What is being typed: ``filter``, ``reason`` or ``yes``; empty if nothing is."""
        self._typed = ""
        self._target: tuple[str, frozenset[int]] = ("", frozenset())
        self._holders = ""
        self._reason = ""

    def run(self) -> None:
        """Draws and reads keys until the person quits."""
        from holdfast.cli.top.terminal import keys_of

        screen, going = self._screen, True
        while going:
            screen.message = self._reader.message or screen.message
            screen.prompt = self._prompt()
            self._terminal.draw(screen.lines(*self._terminal.size()))
            typed = self._terminal.read(REDRAW_SECONDS)
            asked = self._asks
            for key in keys_of(typed):
                going = going and self._key(key)
                if self._asks == "yes" != asked:
                    break  # what was typed before the question was shown is no answer to it

    def _prompt(self) -> str:
        if self._asks == "filter":
            return f"filter: {self._typed}█"
        name = _short(self._target[0])
        if self._asks == "reason":
            return f"why break {name}? (the holder is told; Esc: no) {self._typed}█"
        if self._asks == "yes":
            return (
                f"break {name}, held by {self._holders}? The holder goes on until its "
                "next renewal; only a fence stops its writes. y/N "
            )
        return ""

    def _key(self, key: str) -> bool:
        """Does what a key means; returns ``False`` to quit."""
        if self._asks:
            self._answer(key)
            return True
        self._reader.message = self._screen.message = ""
        if key == "q":
            return False
        self._move(key)
        self._change(key)
        return True

    def _move(self, key: str) -> None:
        screen = self._screen
        page, end = screen.page(), 10**6
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page-up": -page, "page-down": page}
        step = {**steps, " ": page, "home": -end, "end": end}.get(key, 0)
        if step:
            screen.move(step)

    def _change(self, key: str) -> None:
        screen = self._screen
        views = {"t": "tree", "c": "changes", "?": "help", "h": "help", "enter": "name"}
        if key in views:
            screen.show(views[key])
        elif key == "escape" and screen.view != "list":
            screen.show(screen.view)
        elif key == "escape":
            screen.filter = ""
        elif key == "s":
            words = list(SORTS)
            screen.sort = words[(words.index(screen.sort) + 1) % len(words)]
        elif key == "/":
            self._asks, self._typed = "filter", screen.filter
        elif key == "b":
            self._ask_break()

    def _ask_break(self) -> None:
        row = self._screen.row()
        holders = list(row.info.holders) if row is not None else []
        if row is None or not holders or self._screen.view not in ("list", "name"):
            self._screen.message = "select a name that is held, then press b"
            return
        tokens = frozenset(holder.token for holder in holders)
        more = f" and {len(holders) - 1} more" if len(holders) > 1 else ""
        self._holders = f"{_short(holders[0].host)} pid {holders[0].pid}{more}"
        self._target, self._asks, self._typed = (row.name, tokens), "reason", ""

    def _answer(self, key: str) -> None:
        """A key while something is asked."""
        if self._asks == "yes":
            self._decide(key)
        elif key == "escape":
            self._screen.filter = "" if self._asks == "filter" else self._screen.filter
            self._asks = ""
        elif key == "enter":
            self._entered()
        else:
            self._typed = self._typed[:-1] if key == "backspace" else self._typed
            self._typed = (self._typed + (key if len(key) == 1 else ""))[:LONGEST_TYPED]
            if self._asks == "filter":
                self._screen.filter = self._typed

    def _entered(self) -> None:
        if self._asks == "filter":
            self._asks = ""
        elif self._typed.strip():
            self._reason, self._asks = self._typed.strip(), "yes"

    def _decide(self, key: str) -> None:
        self._asks = ""
        if key in ("y", "Y"):
            self._reader.break_lock(*self._target, self._reason)
        else:
            self._screen.message = "nothing was done"
