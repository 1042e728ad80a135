"""The local queue: of all waiters of one client for a name, only the first is in the store's queue.

It is an optimisation, not a lock: the store decides. So it needs no mutex. Every step is one atomic
dict operation, and the order of the steps never loses a waiter. A race at worst puts two waiters of
one client into the store's queue.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import NamedTuple
from weakref import ref

from holdfast.claim import Claim, Grant
from holdfast.core.contract import Runtime, Signal, Waiting
from holdfast.errors import BackendUnavailable

__all__ = ["LocalQueues", "LocalWaiter"]


class LocalWaiter:
    """One acquire that waits, or is about to send its attempt."""

    __slots__ = (
        "__weakref__",
        "answer",
        "behind",
        "claim",
        "gone",
        "got_hold",
        "in_store_queue",
        "key",
        "queue",
        "signal",
        "unanswered",
    )

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.queue: Queue | None = None
        self.key: ref[LocalWaiter] | None = None
        self.signal: Signal | None = None
        self.in_store_queue = False
        """Whether the claim has an entry in the store's queue."""
        self.unanswered = False
        """Whether a request for the claim was not answered, and may still arrive."""
        self.answer: tuple[Grant, float] | None = None
        """A grant that an exchange of another thread or a wake-up delivered, and when its certain
        time began."""
        self.behind = 0
        """How many waiters behind it the store's entry tells of."""
        self.gone = False
        self.got_hold = False
        """Whether the acquire ended with a hold."""

    @property
    def first(self) -> bool:
        """Whether this is the first waiter of its name in the client."""
        return self.queue is not None and _first(self.queue) is self

    def waiting(self) -> Waiting:
        """What the renewer refreshes in the store."""
        return Waiting(self.claim, len(self.queue) - 1 if self.queue else 0)


class Outage(NamedTuple):
    """The store does not answer the attempts for a name."""

    since: float
    """When the first attempt was sent that was not answered."""
    error: BackendUnavailable


# Weak: an interrupt may destroy an acquire before it can leave. A dead reference is not first.
Queue = OrderedDict[ref[LocalWaiter], None]


def _first(queue: Queue) -> LocalWaiter | None:
    """The first live waiter; removes the dead ones in front of it."""
    while queue:
        try:
            key = next(iter(queue))
        except (RuntimeError, StopIteration):
            continue  # another thread joined or left between the two steps of this look
        waiter = key()
        if waiter is not None and not waiter.gone:
            return waiter
        queue.pop(key, None)
    return None


class LocalQueues:
    """The queues of one client, by name."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._queues: dict[str, Queue] = {}
        self.outages: dict[str, Outage] = {}
        """By name, while its first waiter gets no answers. Those behind it have not less patience
        left than it has, so they need to know."""

    def join(self, waiter: LocalWaiter) -> bool:
        """Joins the queue of the name; returns whether the waiter is the first."""
        name = waiter.claim.name
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues.setdefault(name, OrderedDict())
        if queue:
            waiter.signal = self._runtime.signal()
        waiter.queue = queue
        waiter.key = ref(waiter, partial(self._collected, queue))
        queue[waiter.key] = None
        if len(queue) == 1:
            return True
        if waiter.signal is None:  # another waiter joined at the same moment
            waiter.signal = self._runtime.signal()
        return waiter.first

    def leave(self, waiter: LocalWaiter) -> None:
        """Leaves the queue and wakes the next waiter. May be called again."""
        waiter.gone = True
        queue, key = waiter.queue, waiter.key
        if queue is None or key is None:
            return
        queue.pop(key, None)
        if queue:
            self._wake_first(queue)
        elif self._queues.get(waiter.claim.name) is queue:
            self._queues.pop(waiter.claim.name, None)
            if self.outages:
                self.outages.pop(waiter.claim.name, None)
        waiter.key = None  # last: a caller that is interrupted before this leaves again

    def _wake_first(self, queue: Queue) -> None:
        next_waiter = _first(queue)
        if next_waiter is not None and next_waiter.signal is not None:
            next_waiter.signal.set()

    def _collected(self, queue: Queue, key: ref[LocalWaiter]) -> None:
        """Runs in a destructor: an acquire ended without leaving the queue."""
        if key in queue:
            queue.pop(key, None)
            self._wake_first(queue)

    def in_store_queue(self, name: str) -> LocalWaiter | None:
        """The first waiter of this client for the name, if it is in the store's queue."""
        if not self._queues:
            return None
        queue = self._queues.get(name)
        waiter = _first(queue) if queue else None
        return waiter if waiter is not None and waiter.in_store_queue else None

    def unreachable(self, name: str, sent: float, error: BackendUnavailable) -> Outage:
        """An attempt for the name was not answered; returns the outage, and wakes the waiters
        behind the first when it begins."""
        known = self.outages.get(name)
        outage = self.outages[name] = Outage(sent if known is None else known.since, error)
        if known is None:
            for waiter in self._waiters(self._queues.get(name)):
                if waiter.signal is not None:
                    waiter.signal.set()
        return outage

    def reachable(self, name: str) -> None:
        """An attempt for the name was answered."""
        if self.outages:
            self.outages.pop(name, None)

    def of(self, name: str) -> list[LocalWaiter]:
        """The waiters of this client for the name, the first of them first."""
        waiters = self._waiters(self._queues.get(name))
        return [waiter for waiter in waiters if not waiter.gone]

    def ahead_of(self, waiter: LocalWaiter) -> int:
        """How many waiters of this client are in front of this one."""
        waiters = self._waiters(waiter.queue)
        return waiters.index(waiter) if waiter in waiters else 0

    def clear(self) -> None:
        """Removes all waiters. For a forked child, and for a new event loop."""
        self._queues = {}
        self.outages = {}

    def all(self) -> list[LocalWaiter]:
        """All waiters of this client."""
        queues = list(self._queues.values())
        return [waiter for queue in queues for waiter in self._waiters(queue)]

    def _waiters(self, queue: Queue | None) -> list[LocalWaiter]:
        waiters = [key() for key in list(queue or ())]
        return [waiter for waiter in waiters if waiter is not None]
