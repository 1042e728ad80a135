"""The options that every primitive takes, checked in one place."""

# Without "from __future__ import annotations": see holdfast.lazy.
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from holdfast.claim import LONGEST_KIND, LONGEST_NOTE_BYTES
from holdfast.durations import LONGEST_SECONDS, Duration, seconds, timeout_seconds

if TYPE_CHECKING:
    from holdfast.core.contract import Store

__all__ = ["LockOptions", "Options", "TakeOverOptions", "TtlOutOfRange", "make_options"]


class Options(TypedDict, total=False):
    """The keyword arguments of every primitive, as a caller gives them."""

    ttl: Duration
    timeout: Duration | None
    renew: bool
    reentrant: bool
    max_hold: Duration | None
    note: str | None
    kind: str | None


class TakeOverOptions(TypedDict, total=False):
    """The keyword arguments of ``take_over``: the others are those of the hold."""

    timeout: Duration | None
    renew: bool
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
    kind: str = ""


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
        check_flag(options.get("renew", True), "renew"),
        check_flag(options.get("reentrant", False), "reentrant"),
        None if max_hold is None else seconds(max_hold, "max_hold"),
        check_note(options.get("note")),
        check_kind(options.get("kind")),
    )


class TtlOutOfRange(ValueError):
    """The store does not honour such a ttl; ``.nearest`` is the nearest that it does."""

    nearest: float


def check_ttl(ttl: float, store: "Store") -> float:
    """The ttl, rounded up if the store counts whole seconds; ``TtlOutOfRange`` if out of its
    range."""
    if store.whole_seconds:
        ttl = -(-ttl // 1)  # rounded up
    shortest, longest = store.shortest_ttl, min(store.longest_ttl, LONGEST_SECONDS)
    if not shortest <= ttl <= longest:
        limits = f"{shortest:g} s at least and {longest:.10g} s at most"
        error = TtlOutOfRange(f"ttl={ttl:g}: {store.display} honours {limits}")
        error.nearest = shortest if ttl < shortest else longest
        raise error
    return ttl


def check_flag(value: bool, word: str) -> bool:
    """The value; raises ``TypeError`` for what is no bool: the text "no" would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{word} is True or False, not {value!r:.40}")
    return value


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


def check_kind(kind: str | None) -> str:
    """The kind, or "" for ``None``. Raises for what is no text, too long or not printable."""
    if kind is None:
        return ""
    if not isinstance(kind, str):
        raise TypeError(f"kind is text, not {type(kind).__name__}")
    if not 0 < len(kind) <= LONGEST_KIND or not kind.isprintable():
        raise ValueError(
            f"kind is 1 to {LONGEST_KIND} printable characters; not {kind[:80]!r}. It is one word "
            "for many names, such as 'order' for 'order:42'"
        )
    return kind


def refuse_unknown(
    options: Mapping[str, object], known: Iterable[str] = Options.__annotations__
) -> None:
    """Raises ``TypeError`` for an unknown option; names our word for another library's word."""
    for word in options:
        if word not in known:
            from holdfast.primitives.spellings import unknown_argument

            raise unknown_argument(word, known)
