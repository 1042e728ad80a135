"""What the verbs have in common: options, how their values are read, and opening the client."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from holdfast.cli.exits import USAGE, BadSetting, Refused
from holdfast.cli.output.text import is_terminal, say
from holdfast.cli.parsing.parser import Parser, wrong
from holdfast.durations import LONGEST_SECONDS
from holdfast.url import environment_url, read_secret

if TYPE_CHECKING:
    from types import SimpleNamespace

    from holdfast import Locks
    from holdfast.claim import FenceKeys

__all__ = [
    "PATIENCE_SECONDS",
    "Parser",
    "bind_address",
    "connect",
    "connect_to_hold",
    "epoch_option",
    "exit_code",
    "fence_keys",
    "length",
    "seconds",
    "store_options",
    "store_url",
    "whole",
]

PATIENCE_SECONDS = 30.0
"""How long a command without a time limit tries a store that can't be reached."""

TOLD_BY_VERBS = ("lost %r ", "broke %r ")
"""How log lines begin that the verbs' own messages repeat."""

KEYS = "HOLDFAST_FENCE_KEYS"
KEYS_FILE = "HOLDFAST_FENCE_KEYS_FILE"

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def store_options(parser: Parser) -> None:
    """``--url`` and ``--namespace``."""
    parser.add_argument(
        "--url", help="the store (others can see it: no password); else $HOLDFAST_URL, else local"
    )
    parser.add_argument("--namespace", help="the part of the store that is used (holdfast)")


def epoch_option(parser: Parser) -> None:
    """``--epoch``, for verbs that hand out fences."""
    parser.add_argument(
        "--epoch", metavar="N", type=count, help="of the deployment, as in connect(epoch=N) (0)"
    )


def json_option(parser: Parser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def seconds(text: str) -> float:
    """A number of seconds, or numbers with units: 250ms, 30s, 5m, 1h30m, 1d.

    >>> seconds("1.5"), seconds("5m"), seconds("1h30m")
    (1.5, 300.0, 5400.0)
    """
    try:
        value = float(text)
    except ValueError:
        value = _with_units(text)
    if not 0 <= value < float("inf"):
        message = f"{text!r} is no duration: seconds, or numbers with ms, s, m, h or d, as in 1h30m"
        raise wrong(message)
    return value


def _with_units(text: str) -> float:
    """The sum of numbers with units; -1 if it is anything else."""
    import re

    number = r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h|d)"
    if not re.fullmatch(f"(?:{number})+", text, re.ASCII):
        return -1.0
    return sum(float(digits) * _UNITS[unit] for digits, unit in re.findall(number, text, re.ASCII))


def length(text: str) -> float:
    """A duration that is more than nothing, and at most what any duration of ours may be."""
    value = seconds(text)
    if not 0 < value <= LONGEST_SECONDS:
        raise wrong(f"{text!r} must be more than 0, and {LONGEST_SECONDS:.0f} s (366d) at most")
    return value


def whole(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise wrong(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def count(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isascii() or not text.isdecimal():
        raise wrong(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def exit_code(text: str) -> int:
    """An exit code, 0 to 255."""
    if not text.isascii() or not text.isdecimal() or int(text) > 255:
        raise wrong(f"{text!r} is not an exit code: 0 to 255")
    return int(text)


def bind_address(text: str) -> tuple[str, int]:
    """A host and a port to listen on.

    >>> bind_address("127.0.0.1:8086"), bind_address("[::1]:8086")
    (('127.0.0.1', 8086), ('::1', 8086))
    """
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not (colon and bare and is_port) or (":" in bare and bare == host):
        raise wrong(f"{text!r} is not HOST:PORT, as in 127.0.0.1:8086 or [::1]:8086")
    return bare, int(port)


def fence_keys() -> FenceKeys:
    """The keys that sign and verify fences: never from the command line, which others can see."""
    from holdfast.claim import FenceKeys

    text, path = (os.environ.get(word, "") for word in (KEYS, KEYS_FILE))
    if text and path:
        raise BadSetting(f"{KEYS} and {KEYS_FILE} are both set: which keys are meant?")
    try:
        if path:
            text = read_secret(path, KEYS_FILE)
        if text and not text.split():  # without keys nothing would be signed or verified
            raise BadSetting(f"{KEYS} is set, and has no keys")
        return FenceKeys(text.split())
    except ValueError as error:
        raise BadSetting(f"keys of fences: {error}") from None


def store_url(url: str | None) -> str | None:
    """The URL given, or the environment's."""
    try:
        return url or environment_url()
    except ValueError as error:
        raise BadSetting(str(error)) from None


def connect_to_hold(options: SimpleNamespace) -> Locks:
    """Opens the client for a verb that takes locks, with the ttl of its options."""
    from holdfast.primitives.options import TtlOutOfRange

    given = {"ttl": options.ttl, "epoch": options.epoch}
    try:
        return _open(options.url, options.namespace, given)
    except TtlOutOfRange as error:
        if options.ttl is not None:
            raise Refused(str(error), USAGE) from None
        raise BadSetting(f"{error}: choose one with --ttl") from None


def connect(url: str | None, namespace: str | None) -> Locks:
    """Opens the client for a verb that takes no locks of its own: any ttl is right, also where the
    store does not honour the default."""
    from holdfast.primitives.options import TtlOutOfRange

    try:
        return _open(url, namespace, {})
    except TtlOutOfRange as error:
        return _open(url, namespace, {"ttl": error.nearest})


def _open(url: str | None, namespace: str | None, given: dict[str, Any]) -> Locks:
    """Opens the client of the store. Prints a notice on a terminal if that is ``local``. Raises
    ``TtlOutOfRange``; ``BadSetting`` for anything else."""
    url = store_url(url)
    if not url:
        url = "local"
        if is_terminal(2):
            say("using the local store of this machine: neither --url nor HOLDFAST_URL is set")
    import holdfast
    from holdfast.core import log

    log.at_first_line(_log_to_standard_error)
    from holdfast.primitives.options import TtlOutOfRange

    given = {"namespace": namespace, **given}
    settings = {word: value for word, value in given.items() if value is not None}
    settings |= {"fence_keys": fence_keys(), "patience": PATIENCE_SECONDS}
    try:
        return holdfast.Locks(url, **settings)  # connect() would load more than a command needs
    except TtlOutOfRange:
        raise
    except (ValueError, ImportError) as error:
        raise BadSetting(str(error)) from error


def _log_to_standard_error() -> None:
    """Log lines, too, carry what others wrote: they go the same way as our own messages."""
    import logging

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not str(record.msg).startswith(TOLD_BY_VERBS):
                say(record.getMessage())

    logger = logging.getLogger("holdfast")
    if not logger.handlers:
        logger.addHandler(Handler(logging.WARNING))
        logger.propagate = False
