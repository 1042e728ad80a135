"""What the core asks of a store and of the world around it.

A ``Store`` is made once per client from a URL, without touching the network. It makes one
``Backend`` for the client itself and, for the renewer thread, another over blocking wires; what
both share (settings, session ids) lives in the store. A ``Backend`` admits claims and knows no
primitive. A ``Runtime`` is time, waiting and identity: blocking, asyncio or simulated.

Every method is ``async def`` and never suspends over a blocking runtime: see ``core.drive``.
"""

# Without "from __future__ import annotations": see holdfast.claim.
import enum
from collections.abc import Coroutine, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from holdfast.claim import Busy, Claim, Grant, LockInfo, Record

__all__ = [
    "Backend",
    "Finding",
    "Glancing",
    "Guarantee",
    "Page",
    "Renewal",
    "Runtime",
    "Settings",
    "Signal",
    "Store",
    "Waiting",
]

REFRESH_SECONDS = 5.0
"""How often the renewer refreshes the entries of those who wait."""
STALE_SECONDS = 15.0
"""A waiter that was not refreshed for so long is skipped without grace."""
GRACE_SECONDS = 2.0
"""How long a freed name stays reserved for the first in line once it was woken."""
IDLE_COUNTER_SECONDS = 7 * 24 * 3600.0
"""How long a token counter that nobody uses is kept; the clock floor takes over after it."""
DIRECT_GRANT_SECONDS = STALE_SECONDS
"""How long a grant lasts, or its ttl if that is shorter, that came with a wake-up, until its holder
renews it: as long as a waiter counts as alive of whom nothing is heard."""
QUEUE_CAP = 10_000
"""How many may stand in the line of one name; one more gets a ``Busy`` without joining it."""


class Guarantee(enum.StrEnum):
    """What a store promises. The table of stores in the README is made of these."""

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
    """Set from any thread, also from a destructor; waited for through ``Runtime.wait``."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    def clear(self) -> None: ...


class Runtime(Protocol):
    """Time, waiting and identity: all that the rules need of the world."""

    blocking: bool
    """Whether nothing may ever suspend: backends pick their wires by this."""

    def now(self) -> float:
        """Seconds on a clock that never jumps and runs during suspend where there is one."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for people and for token floors only."""
        ...

    def me(self) -> Hashable:
        """The calling thread or task: who re-enters, and whose bare ``release()`` this is."""
        ...

    def where(self) -> tuple[str, int]:
        """This host's name and this process's number, for people."""
        ...

    def name_of(self, who: Hashable) -> str:
        """The name of a thread or task that ``me`` named, for people."""
        ...

    def alive(self, who: Hashable) -> bool:
        """Whether a thread or task that ``me`` named can still end what it holds."""
        ...

    def between(self, low: float, high: float, /) -> float:
        """A random number, for jitter."""
        ...

    def mutex(self) -> AbstractContextManager[Any]:
        """A lock for sections of a few lines that never await; not re-entrant."""
        ...

    def signal(self) -> Signal: ...

    async def wait(self, signal: Signal, until: float | None) -> bool:
        """Returns whether the signal was set; ``until`` is on this runtime's clock."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def finish(self, work: Coroutine[Any, Any, object], seconds: float) -> None:
        """Runs the work to its end even if the caller is cancelled; waits for it so long."""
        ...


class Settings(NamedTuple):
    """The client's settings that a store may need."""

    namespace: str = "holdfast"
    connections: int = 4
    request_seconds: float = 5.0
    """How long one request may take before the store counts as unavailable."""
    client: Any = None
    """A user's own client object, accepted for its settings only."""

    def __repr__(self) -> str:  # a client may show its password
        return f"Settings(namespace={self.namespace!r}, connections={self.connections})"


class Waiting(NamedTuple):
    """A claim that stands in line, and how many wait behind it in this client."""

    claim: Claim
    behind: int


class Renewal(NamedTuple):
    """The answer to a batch of renewals, by owner. What is in none of the fields was renewed."""

    lost: dict[str, str] = {}  # noqa: RUF012 - an immutable answer; nobody writes to it
    """Holds that are no longer ours, with the reason: final."""
    unknown: dict[str, str] = {}  # noqa: RUF012
    """Holds whose renewal failed for now, with the cause: tried again until time is over."""
    forgotten: frozenset[str] = frozenset()
    """Waiting claims that no longer stand in line: they attempt anew."""
    since: float | None = None
    """When the renewed certain time began, where it is not the moment the request was sent."""


class Page(NamedTuple):
    """Some of the names that a store knows, and where to go on; ``None`` at the end."""

    standings: list[LockInfo]
    cursor: str | None


class Finding(NamedTuple):
    """One thing that ``check()`` looked at."""

    subject: str
    detail: str
    level: str = "ok"
    """``ok``, ``warning`` (works, with a weaker promise that is named) or ``broken``."""


class Backend(Protocol):
    """How one store admits claims. All requests are idempotent by owner.

    Raises ``BackendUnavailable`` when the outcome is unknown, ``LimitMismatch``,
    ``Incompatible`` and ``Unsupported`` when nothing was changed. Never sleeps between retries
    of its own for longer than ``request_seconds``: retrying is the core's.
    """

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        """Takes the name if the claim fits and nobody in front of it waits; else joins the line.

        With ``join=False`` a claim that does not fit leaves no trace. An owner that holds
        already gets the same grant again (renewed, as by ``renew``); one that stands in line keeps
        its place. A line that is full (``QUEUE_CAP``) answers ``Busy`` with a reason, unjoined.
        Uncontended it is one round trip, given up at ``until`` if that is sooner than
        ``request_seconds``: who waits one second for a lock does not wait five for a store.
        """
        ...

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        """Returns when another attempt is worth it; at ``until`` at the latest, maybe early.
        A store that wakes with a grant gives it here: one made after ``busy`` was answered, for
        ``Grant.seconds``, where another attempt gets the same one for the whole ttl; or one like
        any, with ``Grant.since``, if it asked again itself."""
        ...

    def nudge(self, claim: Claim) -> None:
        """Makes a ``wait`` of this backend for this claim return now. From any thread."""
        ...

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        """``release(grant)`` and ``attempt(claim, join=True)`` in one, in this order."""
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

        An end that is stored already and is later stays: this request, or an attempt, may arrive
        long after later ones. Only with ``shorten`` it becomes the earlier one: the owner asks
        for that by ``extend``. Such a request is sent once: if it had no answer, its outcome is
        unknown. A store that can't do that safely leaves it to the later end.

        The renewer calls it, over blocking wires. It returns or raises by ``until`` (or after
        ``request_seconds``, if that is sooner): a store that hangs must not keep the renewer
        from telling somebody in time that a hold has become doubtful."""
        ...

    async def release(self, grant: Grant) -> bool:
        """Ends the hold if it is still this owner's, and says whether it was; reserves the name
        for the first in line for a short grace, or grants it to that one, for
        ``DIRECT_GRANT_SECONDS`` at the most, and wakes exactly that one. One round trip."""
        ...

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        """Leaves no trace of the claim, held or waiting, and wakes whom that lets in.
        Ordered behind the claim's own earlier requests over the same backend. Given up at
        ``until`` if that is sooner than ``request_seconds``: the renewer has holds to look
        after."""
        ...

    async def revoke(self, name: str) -> list[int]:
        """Ends all holds of the name and answers their tokens; later tokens are higher."""
        ...

    async def look(self, name: str) -> LockInfo:
        """Holders and waiters of one name; both empty where nobody is."""
        ...

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        """Names in use that start with the prefix. A page may be shorter than the limit, and may
        repeat a name of an earlier one: Redis walks keys that move while it does."""
        ...

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        """Keeps a value under the grant's name if the hold is still ours, in one step."""
        ...

    async def recall(self, name: str) -> Record | None: ...

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        """Returns when the highest holder's token may differ from ``seen``. May return early.
        A store without ``WATCH`` just sleeps a jittered second or until ``until``."""
        ...

    async def probe(self) -> list[Finding]:
        """Contacts the store and looks at what its guarantees rest on."""
        ...

    def forget(self) -> None:
        """In a forked child: drops everything inherited without a word to the server."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Glancing(Protocol):
    """A backend whose holds end with a connection or a file, and which can see that by itself.

    The renewer glances about every second, so that nobody works on for a third of a ttl."""

    def glance(self, grants: Sequence[Grant]) -> dict[str, str]:
        """Which holds are over, by owner, with the reason. Sends nothing and never waits."""
        ...


class Store(Protocol):
    """One store as a URL describes it, for one client."""

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
