"""What a client knows about one hold. Leases are handles to it; the renewer keeps it alive."""

# Without "from __future__ import annotations": see holdfast.claim.
import enum
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, Protocol
from weakref import ref

from holdfast.claim import Grant

__all__ = [
    "CONFIRM_SECONDS",
    "Ask",
    "Change",
    "Handle",
    "Hold",
    "State",
    "certain_seconds",
    "grace_seconds",
]

DRIFT_SHARE = 0.01
DRIFT_SECONDS = 0.002
LONGEST_GRACE_SECONDS = 5.0
CONFIRM_SECONDS = 0.5
"""A hold that was granted for a moment is renewed so soon."""
NEVER = float("inf")
MOST_DEAD_HANDLES = 16


@lru_cache  # a program has few ttls, and asks with every hold
def certain_seconds(ttl: float) -> float:
    """How much of a ttl can be relied on although two clocks never run quite alike."""
    return ttl * (1 - DRIFT_SHARE) - DRIFT_SECONDS


@lru_cache
def grace_seconds(ttl: float) -> float:
    """How long before its end a hold becomes doubtful: time enough to stop working."""
    return min(LONGEST_GRACE_SECONDS, ttl / 3)


class Ask(NamedTuple):
    """How a hold is to be acquired and kept, beyond its claim."""

    timeout: float | None
    renew: bool = True
    max_hold: float | None = None
    explain: bool = True
    """Whether a timeout is worth a request to find out who holds it."""


def _nobody() -> Hashable:
    return None


class State(enum.Enum):
    """Where a hold is in its life. Whether it is doubtful is for the clock to say."""

    HELD = "held"
    RELEASED = "released"
    LOST = "lost"


class Handle(Protocol):
    """What a user has of a hold: a lease."""

    _released: bool


def _in_use(handle_ref: ref[Handle]) -> bool:
    handle = handle_ref()
    return handle is not None and not handle._released


class Change:
    """An extend or a renewal that is under way, or waits for its turn."""

    __slots__ = ("__weakref__", "who")

    def __init__(self, who: Hashable = None) -> None:
        self.who = who
        """The thread or task that extends; ``None`` for the renewer."""


class Hold:
    """One hold, from its grant to its end.

    Three rules keep ``ends`` from being later than the end that the store has: the store's end
    only grows, unless the owner shortens it by ``extend``; of one hold at most one extend or
    renewal is under way; and one whose outcome is unknown counts with the earlier end of the two.
    """

    __slots__ = (
        "block",
        "callbacks",
        "cap",
        "cause",
        "changes",
        "doubted",
        "doubtful_at",
        "ends",
        "grant",
        "handles",
        "longest_grace",
        "nested",
        "on_doubt",
        "orphaned",
        "owned_as",
        "reason",
        "renew",
        "renew_at",
        "since",
        "state",
        "stored_ttl",
        "tell",
        "ttl_limit",
        "who",
    )

    def __init__(self, grant: Grant, since: float, renew: bool, cap: float | None) -> None:
        self.grant = grant
        self.since = since
        """The clock before the request was sent that it was granted to."""
        self.renew = renew
        self.cap = cap
        """Until when it may be kept at all (``max_hold``)."""
        self.longest_grace = NEVER if cap is None else (cap - since) / 3
        self.state = State.HELD
        self.handles: list[ref[Handle]] = []
        self.who: Callable[[], Hashable] = _nobody
        """The thread or task that took it, weakly: it may end without ending the hold."""
        self.owned_as: tuple[int, str] | None = None
        """Under what its client finds it for re-entry: ``who`` may be gone when it ends."""
        self.nested = False
        """Whether it was ever re-entered, and may have several handles."""
        self.orphaned: float | None = None
        """When the renewer first saw it without a handle."""
        self.block = False
        """Whether only ``who`` can end it, by leaving its block."""
        self.reason = ""
        self.cause = ""
        """Why the last renewal failed, if it did."""
        self.changes: list[ref[Change]] = []
        """Extends and renewals in their order, of which the first is under way. Appending is
        atomic, and the references are weak: one that an interrupt tore apart blocks no other."""
        self.stored_ttl = grant.claim.ttl
        """The longest ttl that the store may count with."""
        self.ttl_limit = NEVER
        """No longer ttl can be relied on: an extend to this one was not answered, and may land at
        any time."""
        self.doubted = False
        self.on_doubt: Callable[[str], None] | None = None
        self.callbacks: list[Callable[[str], object]] = []
        self.tell: Callable[[Callable[[str], object], str], None] | None = None
        self.renew_at = NEVER
        self.extended(since, grant.seconds)
        if renew and grant.seconds is not None:
            self.renew_at = min(self.renew_at, since + CONFIRM_SECONDS)

    def extended(self, since: float, ttl: float | None = None) -> None:
        """A grant or renewal whose certain time began then."""
        if ttl is None:
            ttl = self.grant.claim.ttl
        ends = since + certain_seconds(ttl)
        self.ends = ends if self.cap is None else min(ends, self.cap)
        self.doubtful_at = self.ends - min(grace_seconds(ttl), self.longest_grace)
        self.renew_at = since + ttl / 3 if self.renew else NEVER
        self.cause = ""
        self.doubted = False

    def shorten(self, grant: Grant, sent: float) -> None:
        """An extend with a shorter ttl is about to be sent: that ttl counts from here on, since it
        may land without an answer."""
        ttl = grant.claim.ttl
        self.ends = min(self.ends, sent + certain_seconds(ttl))
        self.grant = grant
        grace = min(grace_seconds(ttl), self.longest_grace)
        self.doubtful_at = min(self.doubtful_at, self.ends - grace)
        self.renew_by(sent)

    def renew_by(self, at: float) -> None:
        """Renews it then at the latest, if it is to be renewed at all."""
        if self.renew:
            self.renew_at = min(self.renew_at, at)

    def begin(self, change: Change) -> bool:
        """Queues a change of the hold; whether it can go on now."""
        self.changes.append(ref(change))
        return self.is_turn_of(change)

    def is_turn_of(self, change: Change) -> bool:
        """Whether no other change is under way."""
        return next(self.under_way(), None) is change

    def under_way(self) -> Iterator[Change]:
        """The extends and renewals that have begun, in their order."""
        for change in [reference() for reference in self.changes]:
            if change is not None:
                yield change

    def end(self, change: Change) -> None:
        """It is over, or is not to wait any longer."""
        with suppress(ValueError):
            self.changes.remove(ref(change))

    def next_at(self) -> float:
        """When the renewer has to look at it again."""
        return min(self.renew_at, self.watch_at())

    def watch_at(self) -> float:
        """When it becomes doubtful, or ends if it is doubtful already."""
        return self.ends if self.doubted else self.doubtful_at

    def lose(self, reason: str) -> None:
        """It may no longer be ours: everybody who asked to be told is told, once."""
        self.reason = reason  # before the state: whoever sees that it is lost may ask why
        self.state = State.LOST
        self.doubt(reason)
        self.tell_lost()

    def tell_lost(self) -> None:
        """Tells each who asked once, whoever of two threads comes first."""
        while self.callbacks and self.tell is not None:
            with suppress(IndexError):
                self.tell(self.callbacks.pop(0), self.reason)

    def tidy(self) -> None:
        """Forgets handles that are gone, before one that re-enters gets another."""
        if len(self.handles) > MOST_DEAD_HANDLES:
            self.handles = list(filter(_in_use, self.handles))

    def handled(self) -> bool:
        """Whether somebody still has a handle to end it with."""
        return any(map(_in_use, self.handles))

    def doubt(self, reason: str) -> None:
        """Little certain time is left: the block, if it can be stopped, is stopped now."""
        self.doubted = True
        on_doubt, self.on_doubt = self.on_doubt, None
        if on_doubt is not None:
            on_doubt(reason)
