"""The options that every primitive takes, checked in one place."""

# Without "from __future__ import annotations": see holdfast.lazy.
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from holdfast.claim import LONGEST_NOTE_BYTES
from holdfast.durations import INFINITE, Duration, seconds, timeout_seconds

if TYPE_CHECKING:
    from holdfast.core.contract import Store

__all__ = ["LockOptions", "Options", "make_options"]

OTHER_SPELLINGS = {
    "expire": "ttl",
    "expiry": "ttl",
    "lease": "ttl",
    "lease_time": "ttl",
    "lease_duration": "ttl",
    "auto_release_time": "ttl",
    "lock_timeout": "ttl",
    "blocking_timeout": "timeout",
    "wait_timeout": "timeout",
    "auto_renewal": "renew",
    "auto_renew": "renew",
    "identifier": "note",
}


class Options(TypedDict, total=False):
    """The keyword arguments of every primitive, as a caller gives them."""

    ttl: Duration
    timeout: Duration | None
    renew: bool
    reentrant: bool
    max_hold: Duration | None
    note: str | None


class LockOptions(NamedTuple):
    """``Options`` after the check, with the client's defaults filled in."""

    ttl: float
    timeout: float | None
    renew: bool = True
    reentrant: bool = False
    max_hold: float | None = None
    note: str = ""


def make_options(defaults: LockOptions, store: "Store", options: Options) -> LockOptions:
    """The client's defaults, replaced by the caller's options.

    Raises ``TypeError`` for an unknown option, ``ValueError`` for a value out of range.
    """
    refuse_unknown(options)
    ttl = seconds(options["ttl"], "ttl") if "ttl" in options else defaults.ttl
    max_hold = options.get("max_hold")
    return LockOptions(
        check_ttl(ttl, store),
        timeout_seconds(options["timeout"]) if "timeout" in options else defaults.timeout,
        bool(options.get("renew", True)),
        bool(options.get("reentrant", False)),
        None if max_hold is None else seconds(max_hold, "max_hold"),
        check_note(options.get("note")),
    )


def check_ttl(ttl: float, store: "Store") -> float:
    """The ttl, rounded up if the store counts whole seconds; ``ValueError`` if out of its range."""
    if store.whole_seconds:
        ttl = -(-ttl // 1)  # rounded up
    if not store.shortest_ttl <= ttl <= store.longest_ttl:
        longest = (
            "" if store.longest_ttl == INFINITE else f" and {store.longest_ttl:.10g} s at most"
        )
        raise ValueError(
            f"ttl={ttl:g}: {store.display} honours {store.shortest_ttl:g} s at least{longest}"
        )
    return ttl


def check_note(note: str | None) -> str:
    """The note, or "" for ``None``. Raises for what is no text or too long."""
    if note is None:
        return ""
    if not isinstance(note, str):
        raise TypeError(f"note is text, not {type(note).__name__}")
    try:
        size = len(note.encode())
    except UnicodeEncodeError:
        raise ValueError("note can't contain lone surrogates") from None
    if size > LONGEST_NOTE_BYTES:
        raise ValueError(f"note has at most {LONGEST_NOTE_BYTES} bytes, this one has {size}")
    return note


def refuse_unknown(options: Mapping[str, object]) -> None:
    """Raises ``TypeError`` for an unknown option; names our word for another library's word."""
    for word in options:
        if word in OTHER_SPELLINGS:
            raise TypeError(
                f"unknown argument {word!r}: in Holdfast it is {OTHER_SPELLINGS[word]!r}"
            )
        if word not in Options.__annotations__:
            words = ", ".join(Options.__annotations__)
            raise TypeError(f"unknown argument {word!r}: known are {words}")
