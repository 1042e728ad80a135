"""Picks the verb, and turns whatever goes wrong into one line and an exit code."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from holdfast.cli.output.text import say
from holdfast.io import lifetime

__all__ = ["VERBS", "main", "program"]

VERBS: dict[str, tuple[str, str]] = {
    # verb: (module, what it does)
    "run": ("run", "run a command under a lock"),
    "once": ("once", "run a command once per key, across the fleet"),
    "elect": ("elect", "run a command while this is the leader"),
    "ls": ("ls", "list the names that are held or waited for"),
    "show": ("show", "show holders and waiters of a name"),
    "why": ("why", "say in sentences why a name can't be had"),
    "top": ("top", "watch a store live on the terminal: what waits longest comes first"),
    "dashboard": ("dashboard", "watch a store live in the browser"),
    "break": ("break_", "end the hold of another client"),
    "fence": ("fence", "carry a fence to a resource"),
    "stores": ("stores", "compare the stores: promises and speed"),
    "estimate": ("estimate", "estimate waits and what a crash costs, before it is built"),
    "check": ("check", "contact a store and verify what its guarantees rest on"),
    "init": ("init", "mark a new deployment of a store as new"),
    "schema": ("schema", "print the SQL that a database store needs"),
    "exporter": ("exporter", "serve what a store holds to Prometheus"),
    "bench": ("bench", "measure a store of your own"),
}

OTHER_VERBS = {
    **dict.fromkeys(("list", "locks", "ps"), "ls"),
    **dict.fromkeys(("info", "inspect", "status", "get", "who"), "show"),
    **dict.fromkeys(("explain", "blocked"), "why"),
    **dict.fromkeys(("lock", "exec", "with", "flock"), "run"),
    **dict.fromkeys(("unlock", "release", "rm", "delete", "kill"), "break"),
    **dict.fromkeys(("leader", "campaign"), "elect"),
    **dict.fromkeys(("ping", "test", "doctor"), "check"),
    **dict.fromkeys(("watch", "htop"), "top"),
    **dict.fromkeys(("web", "ui", "serve"), "dashboard"),
}
"""Words that people try first."""


def main(argv: Sequence[str] | None = None) -> int:
    """The ``holdfast`` command: returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _verb(arguments)(arguments[1:])
        if sys.stdout is not None:  # it is, where the caller has closed it
            sys.stdout.flush()
    except KeyboardInterrupt as interruption:
        code = 128 + int(getattr(interruption, "signum", 2))
    except BrokenPipeError:
        # The reader of our output is gone, as with `| head`: not worth a word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 128 + 13
    except Exception as error:  # noqa: BLE001 - the one place where all errors end
        code = _explain(error)
    return code


def program() -> NoReturn:
    """The ``holdfast`` program: ends with its verb. All is closed and written by then, and the
    interpreter's own shutdown takes a tenth of a short command."""
    gc.set_threshold(50_000)  # loading modules leaves nothing to collect
    lifetime.leave()
    code = main()
    if sys.stderr is not None:
        sys.stderr.flush()
    os._exit(code)


def _verb(arguments: list[str]) -> Callable[[list[str]], int]:
    word = arguments[0] if arguments else "--help"
    if word in ("-h", "--help", "help"):
        return _help
    if word in ("-V", "--version"):
        return _version
    if word not in VERBS:
        raise _no_verb(word)
    import importlib

    verb: Callable[[list[str]], int] = importlib.import_module(
        f"holdfast.cli.{VERBS[word][0]}"
    ).main
    return verb


def _no_verb(word: str) -> Exception:
    from difflib import get_close_matches

    from holdfast.cli.exits import USAGE, Refused
    from holdfast.cli.parsing.parser import without_urls

    option = word.startswith("-")
    known = ("--help", "--version") if option else tuple(VERBS)
    meant = OTHER_VERBS.get(word) or "".join(get_close_matches(word, known, 1))
    hint = f": did you mean {meant}?" if meant else ""
    message = f"there is no verb {word!r}{hint} (there are {', '.join(known)})"
    if option:
        message = f"there is no option {word!r} before the verb{hint} (others follow the verb)"
    return Refused(without_urls(message, [word]), USAGE)


def _help(_: list[str]) -> int:
    from holdfast.cli.output.text import terminal_columns, wrap

    width = terminal_columns()
    print("usage: holdfast VERB …\n")
    for verb, (_module, purpose) in VERBS.items():
        first, *more = wrap(purpose, max(20, width - 13))
        print(f"  {verb:<10} {first}")
        for line in more:
            print(f"{'':<13}{line}")
    store = "The store is --url, else $HOLDFAST_URL, else the embedded store of this machine."
    print("", *wrap(f"holdfast VERB --help says more. {store}", width), sep="\n")
    return 0


def _version(_: list[str]) -> int:
    from importlib.metadata import version

    print(f"holdfast {version('holdfast')}")
    return 0


def _explain(error: Exception) -> int:
    from holdfast.cli.exits import DEFECT, NO_OUTPUT, Refused, code_for

    if os.environ.get("HOLDFAST_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    code = code_for(error)
    if code == NO_OUTPUT:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered would fail again
        say(f"standard output can't be written: {getattr(error, 'strerror', error)}")
    elif code == DEFECT and not isinstance(error, Refused):
        say(f"unexpected {type(error).__name__}: {error} (HOLDFAST_DEBUG=1 shows where)")
    else:
        say(str(error))
    return code
