"""The state of one hold in a client. Leases are handles to it; the renewer keeps it alive."""

# Without "from __future__ import annotations": see holdfast.lazy.
import enum
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import ref

from holdfast.claim import Grant

if TYPE_CHECKING:
    from holdfast.core.events import LockUse

__all__ = [
    "CONFIRM_SECONDS",
    "AcquireOptions",
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
"""A hold from a direct grant, which is shorter than its ttl, is renewed this soon."""
NEVER = float("inf")
MOST_DEAD_HANDLES = 16


@lru_cache  # a program has few ttls, and this runs for every hold
def certain_seconds(ttl: float) -> float:
    """How much of a ttl is certain, although the clocks of store and client drift apart."""
    return ttl * (1 - DRIFT_SHARE) - DRIFT_SECONDS


@lru_cache
def grace_seconds(ttl: float) -> float:
    """How long before its end a hold becomes doubtful: the time to stop working."""
    return min(LONGEST_GRACE_SECONDS, ttl / 3)


class AcquireOptions(NamedTuple):
    """How a hold is to be acquired and kept, besides its claim."""

    timeout: float | None
    renew: bool = True
    max_hold: float | None = None
    explain: bool = True
    """Whether a timeout sends one more request, to name the holder in the error."""
    use: "LockUse | None" = None
    """What observers are told of it; ``None`` if there are none."""


def _no_caller() -> Hashable:
    return None


class State(enum.Enum):
    """The state of a hold. Whether it is doubtful is computed from the clock."""

    HELD = "held"
    RELEASED = "released"
    LOST = "lost"


class Handle(Protocol):
    """A user's handle to a hold: a lease."""

    _released: bool


def _in_use(handle_ref: ref[Handle]) -> bool:
    handle = handle_ref()
    return handle is not None and not handle._released


class Change:
    """An extend or a renewal that is under way, or waits for the one before it."""

    __slots__ = ("__weakref__", "caller")

    def __init__(self, caller: Hashable = None) -> None:
        self.caller = caller
        """The thread or task that extends; ``None`` for the renewer."""


class Hold:
    """One hold, from its grant to its end.

    Three rules keep ``ends`` from being later than the end that the store has: the store's end
    only grows, unless the owner shortens it by ``extend``; of one hold at most one extend or
    renewal is under way; and one whose outcome is unknown counts with the earlier end of the two.
    """

    __slots__ = (
        "acquired_by",
        "block",
        "call_back",
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
        "on_doubtful",
        "reason",
        "reason_unread",
        "reentry_key",
        "renew",
        "renew_at",
        "since",
        "state",
        "stored_ttl",
        "ttl_limit",
        "use",
        "without_handle_since",
    )

    def __init__(
        self,
        grant: Grant,
        since: float,
        renew: bool,
        cap: float | None,
        use: "LockUse | None" = None,
    ) -> None:
        self.grant = grant
        self.use = use
        """What observers are told of it; ``None`` if there are none."""
        self.since = since
        """The clock before the granted request was sent."""
        self.renew = renew
        self.cap = cap
        """The latest possible end (``max_hold``)."""
        self.longest_grace = NEVER if cap is None else (cap - since) / 3
        self.state = State.HELD
        self.handles: list[ref[Handle]] = []
        self.acquired_by: Callable[[], Hashable] = _no_caller
        """Weak reference to the thread or task that acquired: it may end before the hold does."""
        self.reentry_key: tuple[int, str] | None = None
        """The key in ``Engine.reentry``: ``acquired_by`` may be dead when the hold ends."""
        self.nested = False
        """Whether it was ever re-entered, and may have several handles."""
        self.without_handle_since: float | None = None
        """When the renewer first saw it without a handle."""
        self.block = False
        """Whether only ``acquired_by`` can end it, by leaving its block."""
        self.reason = ""
        self.reason_unread = False
        """Whether the store has not yet told the reason of a break: see ``core/breaking.py``."""
        self.cause = ""
        """Why the last renewal failed, if it did."""
        self.changes: list[ref[Change]] = []
        """Extends and renewals in their order; the first is under way. Appending is atomic, and the
        references are weak: a change that an interrupt destroyed blocks no other."""
        self.stored_ttl = grant.claim.ttl
        """The longest ttl that the store may count with."""
        self.ttl_limit = NEVER
        """No longer ttl is certain: an extend to this ttl was not answered, and may still
        arrive."""
        self.doubted = False
        self.on_doubtful: Callable[[str], None] | None = None
        self.callbacks: list[Callable[[str], object]] = []
        self.call_back: Callable[[Callable[[str], object], str], None] | None = None
        self.renew_at = NEVER
        self.extended(since, grant.seconds)
        if renew and grant.seconds is not None:
            self.renew_at = min(self.renew_at, since + CONFIRM_SECONDS)

    def extended(self, since: float, ttl: float | None = None) -> None:
        """Applies a grant or renewal whose certain time began at ``since``."""
        if ttl is None:
            ttl = self.grant.claim.ttl
        ends = since + certain_seconds(ttl)
        self.ends = ends if self.cap is None else min(ends, self.cap)
        self.doubtful_at = self.ends - min(grace_seconds(ttl), self.longest_grace)
        self.renew_at = since + ttl / 3 if self.renew else NEVER
        self.cause = ""
        self.doubted = False

    def shorten(self, grant: Grant, sent: float) -> None:
        """Applies a shorter ttl before its extend is sent: from then on the shorter ttl counts,
        since the request may arrive without an answer."""
        ttl = grant.claim.ttl
        self.ends = min(self.ends, sent + certain_seconds(ttl))
        self.grant = grant
        grace = min(grace_seconds(ttl), self.longest_grace)
        self.doubtful_at = min(self.doubtful_at, self.ends - grace)
        self.renew_by(sent)

    def renew_by(self, at: float) -> None:
        """Moves the next renewal to ``at`` if that is earlier, and if the hold is renewed at
        all."""
        if self.renew:
            self.renew_at = min(self.renew_at, at)

    def begin_change(self, change: Change) -> bool:
        """Queues an extend or renewal; returns whether it may start now."""
        self.changes.append(ref(change))
        return self.is_first_change(change)

    def is_first_change(self, change: Change) -> bool:
        """Whether no other change is under way."""
        return next(self.pending_changes(), None) is change

    def pending_changes(self) -> Iterator[Change]:
        """The extends and renewals that have begun, in their order."""
        for change in [reference() for reference in self.changes]:
            if change is not None:
                yield change

    def end_change(self, change: Change) -> None:
        """Removes a change: it is done, or gives up its place in the queue."""
        with suppress(ValueError):
            self.changes.remove(ref(change))

    def next_at(self) -> float:
        """When the renewer has to check it again."""
        return min(self.renew_at, self.watch_at())

    def watch_at(self) -> float:
        """When it becomes doubtful; when it ends, if it is doubtful already."""
        return self.ends if self.doubted else self.doubtful_at

    def mark_lost(self, reason: str) -> None:
        """Sets the state to lost and calls all callbacks, once. Only ``Renewer.declare_lost`` calls
        this."""
        self.reason = reason  # before the state: a reader of the state may read the reason next
        self.state = State.LOST
        self.mark_doubtful(reason)
        self.call_lost_callbacks()

    def call_lost_callbacks(self) -> None:
        """Calls each callback once, also if two threads run this at the same time."""
        while self.callbacks and self.call_back is not None:
            with suppress(IndexError):
                self.call_back(self.callbacks.pop(0), self.reason)

    def drop_dead_handles(self) -> None:
        """Removes handles that are gone, before a re-entry adds another."""
        if len(self.handles) > MOST_DEAD_HANDLES:
            self.handles = list(self.handles_in_use())

    def handles_in_use(self) -> Iterator[ref[Handle]]:
        """The handles that can still end the hold."""
        return filter(_in_use, self.handles)

    def has_handle(self) -> bool:
        """Whether a handle exists that can still end the hold."""
        return any(map(_in_use, self.handles))

    def mark_doubtful(self, reason: str) -> None:
        """Little certain time is left: stops the block, if it can be stopped."""
        self.doubted = True
        on_doubtful, self.on_doubtful = self.on_doubtful, None
        if on_doubtful is not None:
            on_doubtful(reason)
