"""A verb's command line as ``argparse`` reads, explains and refuses it: see ``parser``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from holdfast.cli.output.text import terminal_columns, wrap

if TYPE_CHECKING:
    from holdfast.cli.parsing.parser import Parser

__all__ = ["full_parser"]


WIDEST = 96
"""Longer lines are hard to read."""


TIMES = "TIME is a number of seconds, or numbers with ms, s, m, h or d: 90, 5m, 1h30m."


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """As wide as the terminal: argparse asks for its width at every option, which takes longer
    than all the rest."""

    def __init__(self, prog: str) -> None:
        width = _width()
        super().__init__(prog, max_help_position=min(30, width // 3), width=width)


class _FullParser(argparse.ArgumentParser):
    def __init__(self, declared: Parser) -> None:
        super().__init__(
            prog=declared.prog,
            usage="\n".join(wrap(declared.usage, _width() - 7)) if declared.usage else None,
            description=_filled(declared.description),
            epilog=_filled("\n\n".join(_paragraphs(declared))),
            allow_abbrev=False,
            formatter_class=_Formatter,
        )
        self._declared = declared

    def error(self, message: str) -> NoReturn:
        self._declared.error(message)


def _paragraphs(declared: Parser) -> Iterator[str]:
    """What is said behind the options."""
    if any(argument.settings.get("metavar") == "TIME" for argument in declared.arguments):
        yield TIMES
    if declared.epilog:
        yield declared.epilog


def _width() -> int:
    return min(WIDEST, terminal_columns())


def _filled(text: str) -> str:
    """The paragraphs of a text, each wrapped to the width."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n\n".join("\n".join(wrap(paragraph, _width())) for paragraph in paragraphs)


def full_parser(declared: Parser) -> argparse.ArgumentParser:
    """The same arguments, in the same order."""
    parser = _FullParser(declared)
    groups: dict[str, argparse._MutuallyExclusiveGroup] = {}
    for argument in declared.arguments:
        if argument.group and argument.group not in groups:
            groups[argument.group] = parser.add_mutually_exclusive_group()
        place = groups.get(argument.group, parser)
        place.add_argument(*argument.names, **argument.settings)
    return parser
