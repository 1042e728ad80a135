"""``holdfast why NAME``: in sentences, who holds a name, who waits, and what would free it."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

from holdfast.cli.exits import NOTHING
from holdfast.cli.output.text import neutral, terminal_columns, wrap, write
from holdfast.cli.parsing.options import Parser, connect, store_options
from holdfast.explain import next_grant

if TYPE_CHECKING:
    from holdfast import LockInfo

__all__ = ["break_command", "main", "sentences"]


def main(argv: list[str]) -> int:
    parser = Parser(
        "why",
        "Says in sentences who holds a name and for how long, who waits for it, and what would "
        "have to happen for the next one to get it; exit 1 if nobody holds it or waits for it.",
    )
    parser.add_argument("name", metavar="NAME")
    store_options(parser)
    options = parser.parse_args(argv)
    with connect(options.url, options.namespace) as locks:
        info = locks.inspect(options.name)
    for sentence in sentences(info, time.time()):
        for line in wrap(sentence, terminal_columns()):
            write(f"{line}\n")
    if info.holders:  # in one line, to be copied
        write(f"  {break_command(info.name, options.url, options.namespace)}\n")
    return 0 if info.holders or info.waiters else NOTHING


def sentences(info: LockInfo, now: float) -> list[str]:
    """The answer, a sentence each."""
    name = neutral(repr(info.name))
    if not info.holders:
        return [*_not_held(info, now, name)]
    held, *more = info.explain(now)
    said = [f"{name} is {held}.", *map(_sentence, more)]
    all_of = "it" if len(info.holders) == 1 else "all holds"
    return [*said, f"{next_grant(info)} To end {all_of} now:"]


def _sentence(clause: str) -> str:
    """A host's name is left as it is."""
    return f"The{clause[3:]}." if clause.startswith("the ") else f"{clause}."


def _not_held(info: LockInfo, now: float, name: str) -> list[str]:
    if not info.waiters:
        return [f"Nobody holds {name}, and nobody waits for it: an acquire gets it at once."]
    [waiting] = info.explain(now)
    said = [f"Nobody holds {name} at this moment; {waiting}."]
    said.append("A waiter that lives takes it within a second; a dead one is skipped after 15 s.")
    if info.notice:
        said.append(f"The store says: {neutral(info.notice)}.")
    return said


def break_command(name: str, url: str | None, namespace: str | None) -> str:
    """The command that ends the hold, for a POSIX shell, with the options that chose the store."""
    options = ["--reason TEXT"]
    if namespace:
        options.insert(0, _quoted(f"--namespace={namespace}"))
    if url:
        options.insert(0, "--url=…" if _may_have_secret(url) else _quoted(f"--url={url}"))
    if name.startswith("-"):
        return " ".join(["holdfast break", *options, "--", _quoted(name)])
    return " ".join(["holdfast break", _quoted(name), *options])


def _may_have_secret(url: str) -> bool:
    """A user's part and parameters may have one; they are not told apart here."""
    return "@" in url or "?" in url


def _quoted(text: str) -> str:
    """The text as one word of a shell, with characters that can't be seen as bytes of ``$'…'``."""
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escape, text))}'"


def _escape(character: str) -> str:
    if character.isprintable() and character not in "\\'":
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode(errors="surrogatepass"))
