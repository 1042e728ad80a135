"""Tables for people: aligned text, prettier on a terminal where ``rich`` is installed."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.output.text import is_terminal, neutral, write

__all__ = ["print_table"]

Row = Sequence[str]

WIDEST = 10_000


def print_table(headings: Row, rows: Sequence[Row]) -> None:
    """Prints rows under their headings; what others wrote is neutralised here, cell by cell."""
    clean = [[neutral(cell) for cell in row] for row in rows]
    if not is_terminal(1) or not _print_rich(headings, clean):
        _print_plain(headings, clean)


def _print_rich(headings: Row, rows: Sequence[Row]) -> bool:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # as it is: no markup in hostile text
    # As wide as it has to be: a terminal wraps what does not fit, and nothing is left out.
    Console(width=WIDEST).print(table)
    return True


def _print_plain(headings: Row, rows: Sequence[Row]) -> None:
    lines = [headings, *rows]
    widths = [max(_width(line[i]) for line in lines) for i in range(len(headings))]
    for line in lines:
        cells = (
            cell + " " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True)
        )
        write("  ".join(cells).rstrip() + "\n")


def _width(text: str) -> int:
    """How many columns a terminal needs for it."""
    if text.isascii():
        return len(text)
    import unicodedata

    def columns(character: str) -> int:
        if unicodedata.combining(character):
            return 0
        return 2 if unicodedata.east_asian_width(character) in "WF" else 1

    return sum(map(columns, text))
