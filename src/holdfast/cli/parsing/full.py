"""A verb's command line as ``argparse`` reads, explains and refuses it: see ``parser``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from holdfast.cli.parsing.parser import Parser

__all__ = ["full_parser"]


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Of a fixed width: argparse asks for the terminal's at every option, which takes longer
    than all the rest."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=96)


class _FullParser(argparse.ArgumentParser):
    def __init__(self, declared: Parser) -> None:
        super().__init__(
            prog=declared.prog,
            usage=declared.usage,
            description=declared.description,
            epilog=declared.epilog,
            allow_abbrev=False,
            formatter_class=_Formatter,
        )
        self._declared = declared

    def error(self, message: str) -> NoReturn:
        self._declared.error(message)


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
