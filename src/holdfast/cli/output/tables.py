"""Tables for people. On a terminal they fit its width, and are prettier where ``rich`` is
installed. Elsewhere they are as wide as they have to be: scripts can rely on one line per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.cli.output.text import columns, is_terminal, neutral, terminal_columns, wrap, write

__all__ = ["print_table"]

Row = Sequence[str]

GAP = 2
NARROWEST = 16
"""Only columns that are wider than this are wrapped, and to no less."""
LONGEST_WORD = 24
"""Words up to this long are not broken."""


def print_table(headings: Row, rows: Sequence[Row], spare: Row = ()) -> None:
    """Prints rows under their headings; what others wrote is neutralised here, cell by cell.

    A terminal that is too narrow gets the columns ``spare`` last: they are left out one by one.
    """
    table = [headings, *([neutral(cell) for cell in row] for row in rows)]
    if not is_terminal(1):
        _print_lines(table, _natural(table))
        return
    width = terminal_columns()
    for nth, candidate in enumerate(_candidates(table, spare)):
        widths = _fitted(candidate, width - GAP * (len(candidate[0]) - 1))
        # Empty columns go before anything is wrapped.
        if widths is not None and (nth or widths == _natural(table)):
            if not _print_rich(candidate, widths, width):
                _print_lines(candidate, widths)
            return
    _print_records(table, width)


def _candidates(table: Sequence[Row], spare: Row) -> Iterator[Sequence[Row]]:
    """The table with fewer and fewer columns: all, those with text in them, without the spare."""
    headings, *rows = table
    yield table
    kept = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    yield [[row[i] for i in kept] for row in table]
    for heading in spare:
        kept = [i for i in kept if headings[i] != heading]
        yield [[row[i] for i in kept] for row in table]


def _natural(table: Sequence[Row]) -> list[int]:
    """The width of each column without any wrapping."""
    return [max(map(columns, cells)) for cells in zip(*table, strict=True)]


def _fitted(table: Sequence[Row], room: int) -> list[int] | None:
    """The widths of the columns, of which the widest are narrowed; ``None`` if there is too little
    room."""
    widths = _natural(table)
    words = [
        max(columns(w) for cell in cells for w in cell.split(" "))
        for cells in zip(*table, strict=True)
    ]
    least = [
        min(width, max(NARROWEST, min(LONGEST_WORD, word)))
        for width, word in zip(widths, words, strict=True)
    ]
    if sum(least) > room:
        return None
    while sum(widths) > room:
        surplus = [width - low for width, low in zip(widths, least, strict=True)]
        widths[surplus.index(max(surplus))] -= 1
    return widths


def _print_rich(table: Sequence[Row], widths: list[int], width: int) -> bool:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    headings, *rows = table
    pretty = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for heading, size in zip(headings, widths, strict=True):
        pretty.add_column(heading, no_wrap=True, width=size)
    for row in rows:  # as it is: no markup in hostile text
        cells = (wrap(cell, size) for cell, size in zip(row, widths, strict=True))
        pretty.add_row(*(Text("\n".join(lines)) for lines in cells))
    Console(width=width).print(pretty)
    return True


def _print_lines(table: Sequence[Row], widths: list[int]) -> None:
    for row in table:
        cells = [wrap(cell, size) for cell, size in zip(row, widths, strict=True)]
        for nth in range(max(map(len, cells))):
            parts = [lines[nth] if nth < len(lines) else "" for lines in cells]
            padded = (
                part + " " * (size - columns(part))
                for part, size in zip(parts, widths, strict=True)
            )
            write((" " * GAP).join(padded).rstrip() + "\n")


def _print_records(table: Sequence[Row], width: int) -> None:
    """For a terminal that is too narrow for a table: the cells of a row below each other."""
    headings, *rows = table
    indent = GAP + max(map(len, headings)) + GAP
    for row in rows:
        for nth, (heading, cell) in enumerate(zip(headings, row, strict=True)):
            label = f"{' ' * GAP if nth else ''}{heading.lower()}"
            for line in wrap(cell, max(10, width - indent)) if cell else ():
                write(f"{label:<{indent}}{line}\n")
                label = ""
