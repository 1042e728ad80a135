"""One verb's command line.

A plain one is read here. Help, and whatever is not plain or not right, is left to ``argparse``,
which takes longer to load and to set up than a lock to take: it is given the same declarations,
and only then.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

from holdfast.cli.exits import USAGE, Refused

__all__ = ["Argument", "Parser", "wrong"]

PLAIN = {"action", "default", "help", "metavar", "type"}
"""A verb that declares more (choices, what may be left out) is always read by argparse."""

LIKENESS = 0.7
"""How alike, of 1, a misspelt option is to what was meant."""

OTHER_OPTIONS = {
    **dict.fromkeys(("--timeout", "--blocking-timeout", "--max-wait"), "--wait"),
    **dict.fromkeys(("--expire", "--expiry", "--lease", "--lease-time", "--ex"), "--ttl"),
    **dict.fromkeys(("--nb", "--no-wait", "--nowait", "--try"), "--nonblock"),
    **dict.fromkeys(("--limit", "--permits", "--max"), "--slots"),
    **dict.fromkeys(("--interval",), "--every"),
    **dict.fromkeys(("--force", "-f"), "--yes"),
    **dict.fromkeys(("--store", "--backend", "--redis"), "--url"),
}
"""Words of other programs and libraries for our options."""


def wrong(message: str) -> Exception:
    """The error for an option value that is not valid."""
    from argparse import ArgumentTypeError

    return ArgumentTypeError(message)


def without_urls(message: str, argv: list[str]) -> str:
    """The message with no more than the scheme of each URL that the command line has.

    >>> without_urls("unrecognized arguments: redis://:secret@host", ["redis://:secret@host"])
    'unrecognized arguments: redis://…'
    """
    for word in argv:
        before, found, _ = word.partition("://")
        if found:
            scheme = before.rpartition("=")[2]  # of --option=URL
            url = word[len(before) - len(scheme) :]
            for text in (repr(url)[1:-1], url):
                message = message.replace(text, f"{scheme}://…")
    return message


class Argument:
    """One argument as it was declared, in argparse's words."""

    __slots__ = ("dest", "flag", "group", "names", "settings")

    def __init__(self, names: tuple[str, ...], settings: dict[str, Any], group: str) -> None:
        self.names, self.settings, self.group = names, settings, group
        self.dest = names[-1].lstrip("-").replace("-", "_")
        self.flag = settings.get("action") == "store_true"

    @property
    def positional(self) -> bool:
        return not self.names[0].startswith("-")

    @property
    def plain(self) -> bool:
        return self.settings.keys() <= PLAIN and self.flag == ("action" in self.settings)

    def unless_given(self) -> Any:
        """Its value where the command line does not have it."""
        return self.settings.get("default", False if self.flag else None)

    def read(self, text: str) -> Any:
        """Its value where the command line has it."""
        return self.flag or self.settings.get("type", str)(text)


class _NotPlain(Exception):
    """A command line for argparse to read, or to refuse."""


class Parser:
    """One verb's parser: errors are one line and end with the code for wrong usage."""

    def __init__(self, verb: str, description: str, usage: str | None = None) -> None:
        self.prog, self.description, self.usage = f"holdfast {verb}", description, usage
        self.epilog: str | None = None
        self.runs_command = False
        self.arguments: list[Argument] = []
        self._argv: list[str] = []

    def add_argument(self, *names: str, group: str = "", **settings: Any) -> None:
        """Declares an argument; the words are argparse's, and an option's long name comes last.
        Of those with the same ``group`` only one can be given."""
        self.arguments.append(Argument(names, settings, group))

    def parse_args(self, argv: list[str]) -> SimpleNamespace:
        """Returns the parsed arguments. Exits after ``--help``; raises ``Refused``."""
        self._argv = argv
        try:
            return self.read_plain(argv)
        except Exception:  # noqa: BLE001 - argparse finds it, too, and says what is wrong
            from holdfast.cli.parsing.full import full_parser

            return full_parser(self).parse_args(argv, SimpleNamespace())

    def error(self, message: str) -> NoReturn:
        shown = without_urls(self._hinted(message), self._argv)
        raise Refused(f"{shown} (see {self.prog} --help)", USAGE) from None

    def _hinted(self, message: str) -> str:
        """The message, with what was probably meant where argparse does not know arguments."""
        _, found, unknown = message.partition("unrecognized arguments: ")
        if not found:
            return message
        option = unknown.strip().partition(" ")[0].partition("=")[0]
        if not option.startswith("-"):
            return f"{message}: put -- before the command" if self.runs_command else message
        from difflib import get_close_matches

        options = [name for argument in self.arguments for name in argument.names]
        near = get_close_matches(option[2:], [name[2:] for name in options], 1, LIKENESS)
        words = [OTHER_OPTIONS.get(option, ""), *(f"--{word}" for word in near)]
        meant = next((word for word in words if word in options), "")
        return f"{message}: did you mean {meant}?" if meant else message

    def read_plain(self, argv: list[str]) -> SimpleNamespace:
        """Reads names in full, values that can't be taken for names, and nothing amiss; raises
        for anything else."""
        if not all(argument.plain for argument in self.arguments):
            raise _NotPlain
        found = {argument.dest: argument.unless_given() for argument in self.arguments}
        missing = {argument.dest for argument in self.arguments if argument.positional}
        chosen: dict[str, Argument] = {}
        for argument, text in self._pairs(argv):
            if argument.group and chosen.setdefault(argument.group, argument) is not argument:
                raise _NotPlain
            found[argument.dest] = argument.read(text)
            missing.discard(argument.dest)
        if missing:
            raise _NotPlain
        return SimpleNamespace(**found)

    def _pairs(self, argv: list[str]) -> Iterator[tuple[Argument, str]]:
        """Each argument with its text; a flag has none."""
        places = [argument for argument in self.arguments if argument.positional]
        options = {name: a for a in self.arguments if not a.positional for name in a.names}
        words = iter(argv)
        for word in words:
            if places and not word.startswith("-"):
                yield places.pop(0), word
                continue
            name, equals, text = word.partition("=")
            argument = options.get(name)
            if argument is None or (equals and (argument.flag or not name.startswith("--"))):
                raise _NotPlain
            if not equals and not argument.flag:
                text = next(words, "-")
                if text.startswith("-"):
                    raise _NotPlain
            yield argument, text
