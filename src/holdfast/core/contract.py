"""The contract: what the core requires of a store and of a runtime.

A ``Store`` is made once per client from a URL, without network access. It makes one ``Backend`` for
the client itself and another, over blocking I/O, for the renewer thread. What both share (settings,
session ids) belongs to the store. A ``Backend`` admits claims and knows no primitive. A ``Runtime``
is time, waiting and identity: blocking, asyncio or simulated.

Every method is ``async def`` and never suspends over a blocking runtime: see ``core.drive``.
"""

# Without "from __future__ import annotations": see holdfast.lazy.
import enum
from collections.abc import Coroutine, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from holdfast.claim import Busy, Claim, Grant, LockInfo, Record

__all__ = [
    "Backend",
    "Exchanging",
    "Finding",
    "Glancing",
    "Guarantee",
    "HandingOver",
    "HolderLooking",
    "Page",
    "Renewal",
    "Runtime",
    "Settings",
    "Signal",
    "Store",
    "Waiting",
]

T = TypeVar("T")

REFRESH_SECONDS = 5.0
"""How often the renewer refreshes the queue entries of waiters."""
STALE_SECONDS = 15.0
"""A waiter whose entry was not refreshed for this long is skipped without grace."""
GRACE_SECONDS = 2.0
"""How long a released name stays reserved for the first waiter after its wake-up."""
IDLE_COUNTER_SECONDS = 7 * 24 * 3600.0
"""How long an unused token counter is kept. After that the clock keeps new tokens higher."""
DIRECT_GRANT_SECONDS = STALE_SECONDS
"""Lifetime of a direct grant before its first renewal: min(ttl, this)."""
QUEUE_CAP = 10_000
"""The most entries in the queue of a name; one more attempt gets ``Busy`` without joining."""


class Guarantee(enum.StrEnum):
    """What a store guarantees. The table of stores in the README lists these."""

    EXCLUSIVE = "EXCLUSIVE"
    SHARED = "SHARED"
    SLOTS = "SLOTS"
    FIFO = "FIFO"
    FENCED = "FENCED"
    SURVIVES_SERVER_LOSS = "SURVIVES_SERVER_LOSS"
    CROSS_HOST = "CROSS_HOST"
    RECORDS = "RECORDS"
    WATCH = "WATCH"


class Signal(Protocol):
    """An event: any thread may set it, also in a destructor. ``Runtime.wait`` waits for it."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    def clear(self) -> None: ...


class Runtime(Protocol):
    """Time, waiting and identity: all that the core needs from outside."""

    blocking: bool
    """Whether nothing may ever suspend: a backend chooses its connections by this."""

    def now(self) -> float:
        """Seconds on a clock that never jumps, and that runs during suspend where possible."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch: for people, for token floors, and to notice that the machine was
        stopped from outside. It may be set at any time, so no end of a hold depends on it."""
        ...

    def me(self) -> Hashable:
        """The calling thread or task: for re-entry, and for ``Lock.release()``."""
        ...

    def where(self) -> tuple[str, int]:
        """The host name and the process id, for people."""
        ...

    def name_of(self, caller: Hashable) -> str:
        """The name of a thread or task that ``me`` returned, for people."""
        ...

    def alive(self, caller: Hashable) -> bool:
        """Whether a thread or task that ``me`` returned can still release what it holds."""
        ...

    def between(self, low: float, high: float, /) -> float:
        """A random number, for jitter."""
        ...

    def mutex(self) -> AbstractContextManager[Any]:
        """A lock for sections of a few lines that never await; not re-entrant."""
        ...

    def signal(self) -> Signal: ...

    async def wait(self, signal: Signal, until: float | None) -> bool:
        """Waits for the signal; returns whether it was set. ``until`` is on the runtime's clock."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def finish(self, work: Coroutine[Any, Any, object], seconds: float) -> None:
        """Runs the work to its end even if the caller is cancelled; waits for it at most so
        long."""
        ...

    async def within(self, work: Coroutine[Any, Any, T], seconds: float) -> T | None:
        """Returns the result of the work, or ``None`` if it takes longer or fails. It may then go
        on in the background."""
        ...


class Settings(NamedTuple):
    """The client's settings that a store may need."""

    namespace: str = "holdfast"
    connections: int = 4
    request_seconds: float = 5.0
    """How long one request may take before the store counts as unavailable."""
    client: Any = None
    """A user's own client object; only its settings are used."""

    def __repr__(self) -> str:  # a client may show its password
        return f"Settings(namespace={self.namespace!r}, connections={self.connections})"


class Waiting(NamedTuple):
    """A claim in the store's queue, and how many wait behind it in this client."""

    claim: Claim
    behind: int


class Renewal(NamedTuple):
    """The answer to a batch of renewals, by owner. An owner in none of the fields was renewed."""

    lost: dict[str, str] = {}  # noqa: RUF012 - an immutable answer, never written
    """Holds that are no longer ours, with the reason: final."""
    unknown: dict[str, str] = {}  # noqa: RUF012
    """Holds and waiting claims whose renewal failed for now, with the cause: retried until the
    certain time is over."""
    forgotten: frozenset[str] = frozenset()
    """Claims that are no longer in the store's queue: they attempt again."""
    since: float | None = None
    """When the renewed certain time began; ``None``: when the request was sent."""


class Page(NamedTuple):
    """Some of the names that a store knows, and the cursor of the next page; ``None`` at the
    end."""

    infos: list[LockInfo]
    cursor: str | None


class Finding(NamedTuple):
    """One result of ``check()``."""

    subject: str
    detail: str
    level: str = "ok"
    """``ok``, ``warning`` (works, with a weaker guarantee that is named) or ``broken``."""


class Backend(Protocol):
    """How one store admits claims. All requests are idempotent by owner.

    Raises ``BackendUnavailable`` when the outcome is unknown, ``LimitMismatch``,
    ``Incompatible`` and ``Unsupported`` when nothing was changed. Never sleeps longer than
    ``request_seconds`` between its own retries: retrying is the task of the core.
    """

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        """Grants the claim if it fits and no waiter is in front of it; else it joins the queue.

        With ``join=False`` a claim that does not fit leaves no entry. An owner that already holds
        gets the same grant again (renewed, as by ``renew``). An owner in the queue keeps its
        position. If the queue is full (``QUEUE_CAP``), the answer is ``Busy`` with a reason, and
        the claim does not join. Uncontended it is one round trip. It fails at ``until`` if that is
        sooner than ``request_seconds``: a caller that waits one second for a lock does not wait
        five seconds for a store.
        """
        ...

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        """Returns when another attempt is useful; at ``until`` at the latest, perhaps earlier.

        A store with direct grants returns the grant here. It was made after ``busy`` was answered
        and lasts ``Grant.seconds``; another attempt gets the same grant for the whole ttl. A
        backend that attempted again by itself returns an ordinary grant, with ``Grant.since``."""
        ...

    def nudge(self, claim: Claim) -> None:
        """Makes a ``wait`` of this backend for this claim return now. From any thread."""
        ...

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        """Extends all grants by their claim's ttl from now and refreshes all waiting entries,
        in one round trip for all where the store allows. Only what is still ours is extended.

        A later end that is already stored stays: this request, or an attempt, may arrive long
        after later ones. Only with ``shorten`` the end may become earlier: the owner requests that
        by ``extend``. Such a request is sent once: without an answer its outcome is unknown. A
        store that can't shorten safely keeps the later end.

        The renewer calls it, over blocking I/O. It returns or raises by ``until`` (or after
        ``request_seconds``, if that is sooner): a store that hangs must not keep the renewer from
        its other holds."""
        ...

    async def release(self, grant: Grant) -> bool | None:
        """Ends the hold if it still belongs to this owner, and returns whether it did. Reserves the
        name for the first waiter for a short grace, or grants it directly, for at most
        ``DIRECT_GRANT_SECONDS``, and wakes exactly that waiter. One round trip.

        ``None`` means that the hold is over, but not whether this call ended it: a first request
        was not answered (or was refused half-way), and its repetition found nothing. If the hold
        may still be stored, it raises ``BackendUnavailable`` instead."""
        ...

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        """Removes the claim, held or waiting, and wakes the waiters that now fit. Ordered behind
        the claim's own earlier requests over the same backend. Fails at ``until`` if that is sooner
        than ``request_seconds``: the renewer has other holds to renew."""
        ...

    async def revoke(self, name: str) -> list[int]:
        """Ends all holds of the name and returns their tokens; later tokens are higher."""
        ...

    async def look(self, name: str) -> LockInfo:
        """Holders and waiters of one name; both are empty if there are none."""
        ...

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        """Names in use that start with the prefix. A page may be shorter than the limit, and may
        repeat a name of an earlier page: in Redis keys move during a scan."""
        ...

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        """Stores a value under the grant's name if the hold is still ours, atomically; returns
        whether it did."""
        ...

    async def recall(self, name: str) -> Record | None:
        """The value that ``record`` stored under the name; ``None`` if there is none."""
        ...

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        """Returns when the highest holder's token may differ from ``seen``. May return early.
        A store without ``WATCH`` sleeps up to a second, or until ``until``."""
        ...

    async def probe(self) -> list[Finding]:
        """Contacts the store and checks what its guarantees depend on."""
        ...

    def forget(self) -> None:
        """In a forked child: drops everything inherited, without a request to the server."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Glancing(Protocol):
    """A backend whose holds end with a connection or a file, and that can check this locally.

    The renewer calls ``glance`` about every second. Without it the loss would be found only with
    the next renewal, a third of a ttl later."""

    def glance(self, grants: Sequence[Grant]) -> dict[str, str]:
        """The holds that are over, by owner, with the reason. Sends nothing and never waits."""
        ...


@runtime_checkable
class Exchanging(Protocol):
    """A backend that can release and attempt in one request, for the next waiter of its client.

    Without it the core releases, and the release wakes that waiter when its turn comes."""

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool | None, Grant | Busy]:
        """``release(grant)`` and ``attempt(claim, join=True)`` in one, in this order; both are of
        the same name. Ends nothing if it raises ``LimitMismatch``. A store in which an attempt on
        behalf of a waiter could grant its claim twice answers ``Busy`` for a claim that is in the
        queue."""
        ...


@runtime_checkable
class HandingOver(Protocol):
    """A backend whose holds can be handed over to another process, which is given a text.

    A text says which hold it is: its name, mode, weight, limit, ttl, owner and token, and what
    ``hand_over`` returned."""

    async def hand_over(self, grant: Grant, *, until: float) -> Sequence[str | int] | None:
        """Makes a hold that was just renewed independent of this client: it lasts for one ttl from
        now, also if the client's process or session ends. A store with sessions moves it to a
        session of its own. Returns what ``take_over`` needs besides the claim and the token, to be
        sent as text; ``None`` if the hold is gone. The outcome is unknown if it raises
        ``BackendUnavailable``: ``abandon`` then ends the hold."""
        ...

    async def take_over(self, grant: Grant, claim: Claim, *, until: float) -> Grant | None:
        """If the hold is still stored, with the owner and the token of ``grant``, gives it to the
        owner of ``claim``: with a new, higher token and for one ttl from now. One conditional step:
        it works for one caller only, and the name is free at no moment. ``None`` if the hold is
        gone. An owner that has already taken it over gets it again, renewed: with the same token,
        or with a higher one if the answer before may not have arrived.

        ``Grant.ref`` is what ``hand_over`` returned, from outside: raises ``ValueError`` if it is
        nothing that this store returns. The new grant has the mode, the weight and the slots of the
        old one. Its claim may have another owner than ``claim``; ``abandon(claim)`` ends it all the
        same."""
        ...


@runtime_checkable
class HolderLooking(Protocol):
    """A backend that can name the holders at less cost than ``look``: without the waiters."""

    async def look_at_holders(self, claim: Claim) -> LockInfo:
        """The first holders of the name of a claim that waits or has waited, for messages. The
        answer may have waiters, too."""
        ...


class Store(Protocol):
    """One store, as described by a URL, for one client."""

    display: str
    """The URL without its secrets, for messages."""
    guarantees: frozenset[Guarantee]
    shortest_ttl: float
    longest_ttl: float
    whole_seconds: bool
    """Whether ttls are rounded up to whole seconds (stores with sessions)."""

    def backend(self, runtime: Runtime) -> Backend:
        """Makes a backend. Nothing touches the network before its first request."""
        ...
