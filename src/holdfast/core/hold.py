"""What a door knows about one hold. Leases are handles to it; the keeper keeps it alive."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol
from weakref import ref

from holdfast.claim import Grant

__all__ = ["Ask", "Handle", "Hold", "State", "certain_seconds", "grace_seconds"]

DRIFT_SHARE = 0.01
DRIFT_SECONDS = 0.002
LONGEST_GRACE_SECONDS = 5.0
NEVER = float("inf")


def certain_seconds(ttl: float) -> float:
    """How much of a ttl can be relied on although two clocks never run quite alike."""
    return ttl * (1 - DRIFT_SHARE) - DRIFT_SECONDS


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


class State(enum.Enum):
    """Where a hold is in its life. Whether it is doubtful is for the clock to say."""

    HELD = "held"
    RELEASED = "released"
    LOST = "lost"


class Handle(Protocol):
    """What a user has of a hold: a lease."""

    _released: bool


class Hold:
    """One hold, from its grant to its end."""

    __slots__ = (
        "block",
        "callbacks",
        "cap",
        "cause",
        "doubted",
        "doubtful_at",
        "ends",
        "grant",
        "handles",
        "on_doubt",
        "reason",
        "renew",
        "renew_at",
        "state",
        "tell",
        "who",
    )

    def __init__(self, grant: Grant, since: float, renew: bool, cap: float | None) -> None:
        self.grant = grant
        self.renew = renew
        self.cap = cap
        """Until when it may be kept at all (``max_hold``)."""
        self.state = State.HELD
        self.handles: list[ref[Handle]] = []
        self.who: Hashable = None
        """The thread or task that took it."""
        self.block = False
        """Whether only ``who`` can end it, by leaving its block."""
        self.reason = ""
        self.cause = ""
        """Why the last renewal failed, if it did."""
        self.doubted = False
        self.on_doubt: Callable[[str], None] | None = None
        self.callbacks: list[Callable[[str], object]] | None = None
        self.tell: Callable[[Callable[[str], object], str], None] | None = None
        self.extended(since)

    def extended(self, since: float) -> None:
        """A grant or renewal whose certain time began then."""
        ttl = self.grant.claim.ttl
        ends = since + certain_seconds(ttl)
        self.ends = ends if self.cap is None else min(ends, self.cap)
        self.doubtful_at = self.ends - grace_seconds(ttl)
        self.renew_at = since + ttl / 3 if self.renew else NEVER
        self.cause = ""
        self.doubted = False

    def next_at(self) -> float:
        """When the keeper has to look at it again."""
        clock = self.ends if self.doubted else self.doubtful_at
        return min(self.renew_at, clock)

    def lose(self, reason: str) -> None:
        """It may no longer be ours: everybody who asked to be told is told, once."""
        self.state = State.LOST
        self.reason = reason
        self.doubt(reason)
        callbacks, self.callbacks = self.callbacks, None
        if callbacks and self.tell is not None:
            for callback in callbacks:
                self.tell(callback, reason)

    def handled(self) -> bool:
        """Whether somebody still has a handle to end it with."""
        for handle_ref in self.handles:
            handle = handle_ref()
            if handle is not None and not handle._released:
                return True
        return False

    def doubt(self, reason: str) -> None:
        """Little certain time is left: the block, if it can be stopped, is stopped now."""
        self.doubted = True
        if self.on_doubt is not None:
            on_doubt, self.on_doubt = self.on_doubt, None
            on_doubt(reason)
