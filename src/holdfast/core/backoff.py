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
LAST_ATTEMPT_SECONDS = (0.1, 0.3)
"""So long before the time of an acquire is over it attempts once more: a server that came back
during a long pause is not missed."""
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
UNDO_BACKOFF = Backoff(0.25, 3.0)
"""Between two undos while the store can't be reached: one claim is tried, the others wait."""
UNDO_RETRY_SECONDS = (1.0, 3.0)
"""Between two tries to undo a claim that the store refuses to undo."""

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
QUERY_RETRY_SECONDS = (0.05, 0.25)
"""After a watch or a long poll failed (etcd, Consul)."""
RETRY_JITTER = (0.5, 1.0)
"""Times a pause that grows (Redlock)."""

# One store each.
BUSY_FILE_JITTER = (0.5, 1.5)
"""SQLite: times the pause while another process has the file's write lock."""
FILE_POLL_SECONDS = (0.01, 0.05)
"""SQLite: a waiter without a socket looks at the file this often."""
NO_QUERY_POLL_SECONDS = (0.3, 0.6)
"""Consul: a waiter for which no long poll is free looks this often."""
CONFLICT_SECONDS = (0.0, 0.004)
"""Consul: after a transaction that another one has overtaken, times the number of tries."""
DRAINING_QUEUE_SECONDS = (0.05, 0.2)
"""ZooKeeper: while a queue whose sequence numbers are used up drains."""
UNQUEUED_SECONDS = (0.005, 0.02)
"""ZooKeeper: a wait whose claim has no node to wait with."""
NO_SESSION_SECONDS = (0.01, 0.05)
"""ZooKeeper: a wait while the session is not connected."""
NODE_WATCH_RETRY_SECONDS = (0.1, 0.5)
"""ZooKeeper: after a watch of the holder failed."""
YIELD_RETRY_SECONDS = (0.001, 0.01)
"""Redlock: before the next attempt of a waiter that yields the name."""
SPLIT_VOTE_SECONDS = (0.0005, 0.01)
"""Redlock: after a split vote, so that the contenders do not meet again."""
YOUNG_HOLD_SECONDS = (0.02, 0.08)
"""Redlock: before the next attempt while a young hold is in the way."""
EXPIRY_JITTER = (1, 1.02)
"""Redlock: times the time until a vote ends."""
