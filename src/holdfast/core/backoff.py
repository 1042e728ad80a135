"""Back-off and jitter: every random wait of Holdfast, in one place.

A range of seconds is a pair ``(low, high)``; the wait is a random number between the two, so that
many clients that fail or wake at the same moment do not return at the same moment. ``Backoff`` is
for retries of a failure: it doubles with each try.

This module draws no random numbers. The caller passes the source: ``Runtime.between``,
``holdfast.io.clock.between``, or a seeded one in a simulation.
"""

# Without "from __future__ import annotations": see holdfast.lazy.
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Backoff", "Between", "Range", "pause_within"]

Range = tuple[float, float]
"""The lowest and the highest number of seconds."""
Between = Callable[[float, float], float]
"""Draws a random number between its two arguments."""

MOST_DOUBLINGS = 10


class Backoff(NamedTuple):
    """Exponential back-off: ``first`` seconds, doubled per try up to ``longest``, times jitter."""

    first: float
    longest: float
    jitter: Range = (0.5, 1.0)

    def delay(self, tries: int, between: Between) -> float:
        """Seconds to wait after so many failed tries.

        >>> Backoff(0.05, 2.0).delay(3, lambda low, high: high)
        0.4
        """
        delay = min(self.longest, self.first * 2.0 ** min(tries, MOST_DOUBLINGS))
        return delay * between(*self.jitter)


def pause_within(left: float, seconds: Range, between: Between) -> float:
    """A pause of ``seconds``, but no longer than ``left`` seconds, and never negative.

    >>> pause_within(0.3, (0.5, 1.0), lambda low, high: low)
    0.3
    """
    return max(0.0, min(left, between(*seconds)))


# Acquiring.
OUTAGE_BACKOFF = Backoff(0.05, 2.0)
"""Between two attempts while the store can't be reached."""
RECHECK_SECONDS = (5.0, 8.0)
"""A waiter attempts again without a wake-up: a lost wake-up costs at most this."""
LOCAL_RECHECK_SECONDS = (20.0, 40.0)
"""The same for a waiter in the local queue of its client."""
FIRST_WAITER_SECONDS = (0.005, 0.03)
"""Added to the end of what is in front, by the first waiter in the store's queue."""
LATER_WAITER_SECONDS = (0.05, 0.8)
"""The same for the waiters behind the first."""
SPIN_PAUSE_SECONDS = (0.01, 0.05)
"""After several waits that ended at once: the source of wake-ups may be broken."""

# Renewing and undoing.
RENEWAL_RETRY_SHARE = (0.05, 0.15)
"""A failed renewal is sent again after this share of the time that is left."""
UNDO_RETRY_SECONDS = (1.0, 3.0)
"""Between two tries to undo a claim, without an end: the claim must not stay in the store."""

# Primitives.
WATCH_RETRY_SECONDS = (0.2, 0.6)
"""Between two looks at a leader while the store can't be reached."""
RECORD_RETRY_SECONDS = (0.05, 0.25)
"""Between two tries to read or write the record of a job."""

# Stores. Each range is used by several of them.
STORE_POLL_SECONDS = (0.2, 0.5)
"""A waiter that no subscription reaches looks at the store this often."""
WATCH_POLL_SECONDS = (0.5, 1.0)
"""``Backend.watch`` of a store that does not push changes."""
SUBSCRIPTION_RETRY_SECONDS = (0.1, 0.4)
"""Before a broken subscription is opened again."""
SUBSCRIPTION_LOST_SECONDS = (0.01, 0.1)
"""Before waiters attempt again after their subscription broke."""
SHORT_RACE_SECONDS = (0.01, 0.05)
"""Before a short race with another client is tried again."""
