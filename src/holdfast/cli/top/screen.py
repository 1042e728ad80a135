"""What ``holdfast top`` draws: the list of names, the tree, one name, and the lines around them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.cli.output.lock_info import mode
from holdfast.cli.output.text import clock, duration, neutral, since
from holdfast.dashboard.rows import SORTS, Branch, Row, matching, tree

if TYPE_CHECKING:
    from holdfast import Holder, Waiter
    from holdfast.dashboard.watch import Watch

__all__ = ["Screen"]

WIDE, MEDIUM = 100, 64
"""Columns from which on notes are shown, and how long a name is held."""
AROUND = 4
"""Lines above and below the list: title, status, headings, keys."""
LONGEST_FOOT = 5
"""Lines of a question, of which the last ones are shown."""
WARM_SECONDS, HOT_SECONDS = 10.0, 60.0
"""Waits that are longer are yellow, and red."""
LIMITS = (
    "The store is read every 2 seconds at the most. Lost: a hold whose renewal was overdue and "
    "whose time ran out. A hold that ended earlier was released, or broken elsewhere, or ended "
    "with its session: these can't be told apart. Shorter holds are missed."
)
HELP = (
    "↑ ↓ j k PgUp PgDn Home End   move",
    "Enter   open a name: holders, line, token, note",
    "t       who blocks whom, as a tree; again: the list",
    "s       what comes first: longest wait, line or hold, next end, or name",
    "/       filter by name, host, pid or note; Esc clears it",
    "b       break the selected name: asks for a reason, then for y",
    "c       lost and broken since the start, and what check() says of the store",
    "Ctrl-L  draw again      Esc  back      q  quit",
    "",
    LIMITS,
)


class Screen:
    """What is shown, and where a person is in it."""

    def __init__(self, watch: Watch, store: str) -> None:
        self.watch, self.store = watch, store
        self.view = "list"
        """``list``, ``tree``, ``name``, ``changes`` or ``help``."""
        self.sort = "wait"
        self.filter = ""
        self.selected = ""
        """The name that keys are about: it stays selected when others move."""
        self.prompt = ""
        """What a person is being asked, with what was typed so far."""
        self.message = ""
        self._first = 0
        self._height = 24

    def rows(self) -> list[Row]:
        """The names in their order, filtered."""
        return sorted(matching(self.watch.rows, self.filter), key=SORTS[self.sort])

    def row(self) -> Row | None:
        """The row of the selected name; ``None`` if it is no longer in use."""
        return next((row for row in self.watch.rows if row.name == self.selected), None)

    def move(self, step: int) -> None:
        """Selects another name, or moves the text that is shown."""
        if self.view != "list":
            self._first = max(0, self._first + step)
            return
        names = [row.name for row in self.rows()]
        if names:
            at = names.index(self.selected) if self.selected in names else 0
            self.selected = names[min(len(names) - 1, max(0, at + step))]

    def page(self) -> int:
        """How many lines fit."""
        return max(1, self._height - AROUND)

    def show(self, view: str) -> None:
        """Changes what is shown; the same again goes back to the list."""
        self.view = "list" if view == self.view else view
        self._first = 0

    def lines(self, width: int, height: int) -> list[str]:
        """The screen, as lines for a terminal of this size."""
        self._height = height
        console = Console(width=width, height=height, highlight=False, markup=False, emoji=False)
        with console.capture() as captured:
            for part in (self._title(width), self._status(width), *self._body(width)):
                console.print(part, no_wrap=True, overflow="ellipsis", crop=True)
        drawn = captured.get().splitlines()
        with console.capture() as captured:
            for line in self._foot(width).wrap(console, width)[-LONGEST_FOOT:]:
                console.print(line, no_wrap=True, overflow="ellipsis")
        foot = captured.get().splitlines()
        room = height - len(foot)
        return [*drawn[:room], *[""] * (room - len(drawn)), *foot]

    def _title(self, width: int) -> Text:
        age = self.watch.age_seconds
        old = "reading …" if age is None else f"{age:.0f} s old"
        bad = self.watch.is_stale or bool(self.watch.error)
        left = Text.assemble(("holdfast top", "bold"), "  ", neutral(self.store))
        right = Text(f"STALE {old}" if self.watch.is_stale else old, "bold red" if bad else "green")
        left.truncate(max(12, width - len(right) - 2), overflow="ellipsis", pad=True)
        return Text.assemble(left, "  ", right)

    def _status(self, width: int) -> Text:
        watch, narrow = self.watch, width < MEDIUM
        if watch.error:
            return Text(f"the store can't be read: {neutral(watch.error)}", "bold red")
        waiting = sum(row.waiting for row in watch.rows)
        longest = watch.longest_wait_seconds
        more = "+" if watch.truncated else ""
        names = "" if narrow else f"names {len(watch.rows)}{more}  "
        parts = Text(f"{names}waiting {waiting}")
        if longest:
            parts.append(f"  longest {duration(longest)}", _urgency(longest))
        lost, broken = watch.counts["lost"], watch.counts["broken"]
        if lost or not narrow:
            parts.append(f"  lost {lost}", "bold red" if lost else "")
        if broken or not narrow:
            parts.append(f"  broken {broken}")
        if watch.check_error or any(f.level != "ok" for f in watch.findings):
            parts.append("  check: c" if narrow else "  check: press c", "yellow")
        return parts

    def _body(self, width: int) -> list[RenderableType]:
        if self.view == "list":
            return [self._list(width)]
        if self.view == "tree":
            return self._scrolled([_branch(branch) for branch in tree(self.rows())] or [_quiet()])
        if self.view == "changes":
            return self._scrolled(self._changes(), width)
        if self.view == "help":
            return self._scrolled([Text(line) for line in HELP], width)
        row = self.row()
        opened = row and self.watch.aged(row)
        return self._scrolled(_details(opened, self.selected), width)

    def _scrolled(self, texts: list[Text], width: int = 0) -> list[RenderableType]:
        """The part of a long text that fits, in lines that are wrapped to the width if given."""
        lines = texts
        if width:
            console = Console(width=width)
            lines = [line for text in texts for line in text.wrap(console, width) or [Text("")]]
        room = self.page() + 1
        self._first = max(0, min(self._first, len(lines) - room))
        return list(lines[self._first : self._first + room])

    def _list(self, width: int) -> RenderableType:
        rows = self.rows()
        names = [row.name for row in rows]
        if self.watch.age_seconds is None:
            return Text("\nnot read yet")
        if not rows:
            return Text("\nnothing matches" if self.filter else "\nnothing is held or waited for")
        if self.selected not in names:
            self.selected = names[0]
        at, room = names.index(self.selected), self.page()
        self._first = max(at - room + 1, min(self._first, at, max(0, len(rows) - room)))
        table = _empty_table(width, self.sort)
        for row in rows[self._first : self._first + room]:
            style = "reverse" if row.name == self.selected else ""
            table.add_row(*_cells(self.watch.aged(row), width), style=style)
        return table

    def _changes(self) -> list[Text]:
        watch = self.watch
        texts = [Text(f"since {clock(watch.began)}, newest first:", "bold")]
        for change in reversed(watch.changes):
            style = "green" if change.what == "reachable" else "red"
            when, name = clock(change.at, "%H:%M:%S"), neutral(change.name)
            texts.append(Text.assemble(f"{when} ", (change.what, style), f" {name} "))
            texts[-1].append(neutral(change.detail), "dim")
        texts += [] if watch.changes else [Text("nothing so far")]
        texts += [Text(""), Text("check() of the store:", "bold")]
        if watch.check_error:
            texts.append(Text(neutral(watch.check_error), "red"))
        for found in watch.findings:
            style = "green" if found.level == "ok" else "yellow"
            told = f" {neutral(found.subject)}: {neutral(found.detail)}"
            texts.append(Text.assemble((found.level, style), told))
        return texts

    def _foot(self, width: int) -> Text:
        if self.prompt:
            return Text(neutral(self.prompt), "bold yellow")
        if self.message:
            return Text(neutral(self.message), "bold")
        shown = f"  filter: {neutral(self.filter)}" if self.filter else ""
        if width < MEDIUM:
            return Text(f"q quit  ? help  ⏎ open  / filter  s: {self.sort}{shown}", "dim")
        keys = "q quit  ? help  ⏎ open  / filter  t tree  c changes  b break"
        return Text(f"{keys}  s sort: {self.sort}{shown}", "dim")


def _empty_table(width: int, sort: str) -> Table:
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")

    def column(heading: str, ratio: int = 0, size: int | None = None, by: str = "") -> None:
        table.add_column(
            Text(heading, "bold underline" if by and by == sort else ""),
            ratio=ratio or None,
            width=size,
            no_wrap=True,
            overflow="ellipsis",
            justify="left" if ratio else "right",
        )

    column("NAME", ratio=5, by="name")
    column("WAIT", size=5, by="wait")
    column("LINE", size=5, by="queue")
    column("HELD BY", ratio=4)
    if width >= MEDIUM:
        column("HELD", size=5, by="held")
        column("LEFT", size=5, by="left")
    if width >= WIDE:
        column("NOTE", ratio=4)
    return table


def _cells(row: Row, width: int) -> list[Text]:
    """The cells of a row. They are ``Text``: nothing in them is read as markup."""
    holders = row.info.holders
    more = f" +{len(holders) - 1}" if len(holders) > 1 else ""
    by = f"{neutral(holders[0].host)} pid {holders[0].pid}{more}" if holders else "nobody"
    wait = duration(row.wait_seconds) if row.wait_seconds else ""
    cells = [Text(neutral(row.name)), Text(wait, _urgency(row.wait_seconds))]
    cells += [Text(str(row.waiting or "")), Text(by)]
    if width >= MEDIUM:
        left = "" if math.isinf(row.left_seconds) else duration(row.left_seconds)
        cells += [Text(duration(row.hold_seconds) if holders else ""), Text(left)]
    if width >= WIDE:
        cells.append(Text(neutral(holders[0].note) if holders else "", "dim"))
    return cells


def _urgency(seconds: float) -> str:
    return "bold red" if seconds >= HOT_SECONDS else "yellow" if seconds >= WARM_SECONDS else ""


def _branch(branch: Branch) -> Text:
    indent, who = "  " * branch.depth, branch.who
    if who is None:
        text = Text.assemble(indent, (neutral(branch.name), "bold cyan"))
        if branch.circular:
            text.append("  a circle of waiters: a deadlock", "bold red")
        return text
    verb = ("held by ", "cyan") if branch.what == "holder" else ("waits   ", "yellow")
    person = f"{neutral(who.host)} pid {who.pid} ({neutral(who.thread)})"
    note = (f"  {neutral(who.note)}", "dim")
    return Text.assemble(indent, verb, f"{_long(who)} ", person, note)


def _long(who: Holder | Waiter) -> str:
    """For how long, in the brackets of ``since``."""
    return since(who.since).rpartition("(")[2].rstrip(")").rjust(5)


def _quiet() -> Text:
    return Text("nobody waits for anything")


def _details(row: Row | None, name: str) -> list[Text]:
    if row is None:
        return [Text(f"{neutral(name)}: nobody holds it or waits for it any more")]
    texts = [Text(neutral(name), "bold cyan")]
    if row.info.notice:
        texts.append(Text(f"notice: {neutral(row.info.notice)}", "yellow"))
    for holder in row.info.holders:
        texts += _person("held by", holder, "cyan")
        left = duration(holder.remaining)
        facts = f"  {mode(holder)}, since {since(holder.since)}, left {left}, token {holder.token}"
        texts.append(Text(facts))
    if not row.info.holders:
        texts.append(Text("held by nobody"))
    texts.append(Text(f"{row.waiting} waiting" if row.waiting else "nobody waits for it", "bold"))
    for place, waiter in enumerate(row.info.waiters, 1):
        texts += _person(f"{place}.", waiter, "yellow")
        more = f", and {waiter.behind} more of its process" if waiter.behind else ""
        texts.append(Text(f"  {waiter.mode}, since {since(waiter.since)}{more}"))
    return texts


def _person(label: str, who: Holder | Waiter, style: str) -> list[Text]:
    person = f" {neutral(who.host)} pid {who.pid} ({neutral(who.thread)})"
    lines = [Text.assemble((label, style), person)]
    return lines + ([Text(f"  note: {neutral(who.note)}", "dim")] if who.note else [])
