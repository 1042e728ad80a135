"""Who opens the subscription that many wait for: one of them, and the others don't wait for that
one.

It may take seconds where the network is dark. Who comes meanwhile has a time of its own to keep;
and it may be the very thread that opens the subscription, in a signal handler, which would wait
for itself
for ever. So whoever finds no subscription, and can't open it, looks for itself now and then.
"""

from __future__ import annotations

import random

from holdfast.io.clock import now
from holdfast.io.connection_limit import ConnectionLimit, Permit

__all__ = ["SingleFlight", "look_by", "open_by"]

LOOK_SECONDS = (0.2, 0.5)
"""How often a waiter looks where no subscription reaches it."""
LEAST_OPENING_SECONDS = 0.5
"""A subscription gets so long to open also for a wait that is shorter: the next one needs it."""


def open_by(until: float, seconds: float) -> float:
    """By when a subscription is to be open, for one who waits until then; ``seconds`` at the
    most."""
    moment = now()
    return min(moment + seconds, max(until, moment + LEAST_OPENING_SECONDS))


def look_by(until: float) -> float:
    """When one who waits until then looks for itself."""
    return min(until, now() + random.uniform(*LOOK_SECONDS))


class SingleFlight:
    """The right to open it, which one has at a time. No interrupt loses it."""

    def __init__(self) -> None:
        self._connection_limit = ConnectionLimit(1)
        self._not_before = 0.0

    def begin(self) -> Permit | None:
        """The right, for as long as somebody has it; nothing while another one does, or rests."""
        return self._connection_limit.take() if now() >= self._not_before else None

    def end(self, permit: Permit) -> None:
        self._connection_limit.free(permit)

    def failed(self, since: float) -> None:
        """It was tried in vain: nobody tries again for as long as that took."""
        moment = now()
        self._not_before = moment + (moment - since)
