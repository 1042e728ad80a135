"""Events: what happens to acquires, holds and stores, told to observers.

``Events`` belongs to one client. A client without observers has none, and this module is then not
even imported. An observer runs in one of two places:

- on the thread or task that acquires, releases or breaks: it sees the caller's context, and must
  not block;
- on one thread of the process that delivers what the renewer and the watcher find. Neither of them
  runs user code or waits: they append to a bounded queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

from holdfast.claim import Fence, Holder, Mode, is_traceparent, read_label
from holdfast.core import log
from holdfast.errors import BackendUnavailable, LockTimeout

if TYPE_CHECKING:
    from holdfast.core.engine import Engine
    from holdfast.core.hold import Hold

__all__ = [
    "Acquired",
    "Broken",
    "Cancelled",
    "Doubtful",
    "Events",
    "FenceRefused",
    "Leading",
    "LockEvent",
    "LockUse",
    "Lost",
    "Observer",
    "Ran",
    "Reachable",
    "Released",
    "Renewed",
    "Requested",
    "StoreEvent",
    "TimedOut",
    "Unreachable",
    "WaitBegan",
    "current",
    "installed",
    "limited",
    "refused",
]

MOST_KINDS = 100
OTHER = "other"


@dataclass(eq=False, slots=True, weakref_slot=True)
class LockUse:
    """One acquire and the hold that it gives. All its events have the same object, so an observer
    can keep something for it, also in a ``WeakKeyDictionary``."""

    store: str
    """The URL of the store, without its secrets."""
    name: str
    kind: str
    """What sort of name it is: of few values, for the labels of metrics."""
    mode: Mode
    note: str
    events: Events = field(repr=False)
    began: float = field(repr=False)
    """When the acquire began, on the clock of the client."""
    leads: bool = False
    """Whether the holder is the leader of an election."""
    contended: bool = False
    """Whether it had to wait."""
    token: int = 0
    """The fencing token; 0 until it is granted."""
    granted: float = field(default=0.0, repr=False)
    attempt_seconds: float | None = field(default=None, repr=False)
    """How long the last attempt took, until observers are told of it."""
    told: bool = field(default=False, repr=False)
    """Whether observers were told that it is held: no end is told before that."""
    doubtful_at: float = field(default=0.0, repr=False)
    ended: bool = False
    """Whether the acquire failed, or the hold is over."""

    def tell_attempt(self) -> None:
        """Tells observers of the attempt that was answered last. Not called between a grant and its
        lease: what observers do must not delay that."""
        seconds, self.attempt_seconds = self.attempt_seconds, None
        if seconds is not None:
            self.events.answered("attempt", seconds)


@dataclass(frozen=True, slots=True)
class LockEvent:
    """An event of one acquire or hold."""

    word: ClassVar[str]
    """The method of ``Observer`` that is called."""
    use: LockUse

    @property
    def store(self) -> str:
        """The URL of the store, without its secrets."""
        return self.use.store

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self.use.name

    @property
    def kind(self) -> str:
        """What sort of name it is: of few values, for the labels of metrics."""
        return self.use.kind

    @property
    def mode(self) -> Mode:
        """Exclusive, shared or slots."""
        return self.use.mode

    @property
    def token(self) -> int:
        """The fencing token; 0 if nothing was granted."""
        return self.use.token


@dataclass(frozen=True, slots=True)
class WaitBegan(LockEvent):
    """The name is held by another: the acquire begins to wait."""

    word = "waiting"
    place: int | None
    """How many are in front of it in the store's queue; ``None`` if other waiters of its own client
    are in front of it."""
    holder: Holder | None
    """A holder, if it is known or an observer ``wants_holder``."""


@dataclass(frozen=True, slots=True)
class Acquired(LockEvent):
    """The name is held now."""

    word = "acquired"
    seconds: float
    """How long the acquire took."""
    certain: float
    """How long the hold is certain without a renewal."""
    contended: bool
    """Whether it had to wait."""


@dataclass(frozen=True, slots=True)
class TimedOut(LockEvent):
    """The timeout of an acquire is over."""

    word = "timed_out"
    seconds: float
    holder: Holder | None


@dataclass(frozen=True, slots=True)
class Cancelled(LockEvent):
    """An acquire ended without a hold, and not by its timeout."""

    word = "cancelled"
    seconds: float
    outcome: str
    """``cancelled`` by the program, ``unreachable`` if the store could not be reached for too long,
    ``failed`` by any other error."""
    error: BaseException


@dataclass(frozen=True, slots=True)
class Doubtful(LockEvent):
    """A renewal is overdue and little certain time is left."""

    word = "doubtful"
    remaining: float
    reason: str


@dataclass(frozen=True, slots=True)
class Lost(LockEvent):
    """The hold ended, or may have ended, before it was released. Told once."""

    word = "lost"
    seconds: float
    """How long it was held."""
    reason: str
    cause: str
    """The reason in one of few words: ``expired`` (it was not renewed in time), ``session`` (its
    session, lease or connection ended), ``broken``, ``gone`` (the store no longer had it),
    ``max_hold``, ``closed`` (its client was closed)."""


@dataclass(frozen=True, slots=True)
class Released(LockEvent):
    """The hold was released."""

    word = "released"
    seconds: float
    """How long it was held."""
    ours: bool | None
    """``True``: the release ended it. ``None``: unknown, the store did not answer."""


@dataclass(frozen=True, slots=True)
class Leading(LockEvent):
    """This process became the leader of an election, or is no longer the leader."""

    word = "leading"
    leading: bool


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """An event of a client and its store."""

    word: ClassVar[str]
    store: str
    """The URL of the store, without its secrets."""


@dataclass(frozen=True, slots=True)
class Renewed(StoreEvent):
    """A batch of renewals was answered, or failed."""

    word = "renewed"
    holds: int
    waiters: int
    """How many entries of the store's queue were refreshed with it."""
    seconds: float
    failed: int
    """How many of the holds were not renewed; they are tried again."""
    error: str
    """The type of the error; empty if the store answered."""


@dataclass(frozen=True, slots=True)
class Unreachable(StoreEvent):
    """The first request that the store did not answer."""

    word = "unreachable"
    error: str


@dataclass(frozen=True, slots=True)
class Reachable(StoreEvent):
    """The store answers again."""

    word = "reachable"
    seconds: float
    """How long it did not."""


@dataclass(frozen=True, slots=True)
class Requested(StoreEvent):
    """The store answered one request, or did not."""

    word = "requested"
    operation: str
    """``attempt``, ``release``, ``renew`` or ``abandon``."""
    seconds: float
    error: str
    """The type of the error; empty if the store answered."""


@dataclass(frozen=True, slots=True)
class Broken(StoreEvent):
    """This client has broken the holds of a name."""

    word = "broken"
    name: str
    kind: str
    tokens: tuple[int, ...]
    reason: str
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class Ran(StoreEvent):
    """A call of a job of ``once`` or ``every`` is over."""

    word = "ran"
    key: str
    kind: str
    outcome: str
    """``ran``, ``resumed`` (after a run that crashed), ``failed`` or ``skipped`` (it was done, or
    is being run by another)."""


@dataclass(frozen=True, slots=True)
class FenceRefused:
    """A guard has refused a stale fence."""

    word: ClassVar[str] = "refused"
    resource: str
    fence: Fence


AnyEvent = LockEvent | StoreEvent | FenceRefused


class Observer:
    """Base of observers: one method per event, which does nothing. Events that are added later
    break no observer."""

    def waiting(self, event: WaitBegan) -> None:
        """An acquire begins to wait. On the caller's thread or task."""

    def acquired(self, event: Acquired) -> None:
        """A name is held now. On the caller's thread or task."""

    def timed_out(self, event: TimedOut) -> None:
        """The timeout of an acquire is over. On the caller's thread or task."""

    def cancelled(self, event: Cancelled) -> None:
        """An acquire ended without a hold. On the caller's thread or task."""

    def renewed(self, event: Renewed) -> None:
        """A batch of renewals was answered, or failed. On the delivering thread."""

    def doubtful(self, event: Doubtful) -> None:
        """Little certain time is left of a hold. On the delivering thread."""

    def lost(self, event: Lost) -> None:
        """A hold was lost. Told once, on the delivering thread."""

    def released(self, event: Released) -> None:
        """A hold was released. On the caller's thread or task; if its lease was dropped, on the
        delivering thread."""

    def broken(self, event: Broken) -> None:
        """This client has broken the holds of a name. On the caller's thread or task."""

    def unreachable(self, event: Unreachable) -> None:
        """The store does not answer. On the delivering thread."""

    def reachable(self, event: Reachable) -> None:
        """The store answers again. On the delivering thread."""

    def refused(self, event: FenceRefused) -> None:
        """A guard has refused a stale fence. On the caller's thread or task."""

    def ran(self, event: Ran) -> None:
        """A call of a job is over. On the caller's thread or task."""

    def leading(self, event: Leading) -> None:
        """This process leads an election, or no longer does. With ``acquired``, ``released`` or
        ``lost``."""

    def requested(self, event: Requested) -> None:
        """The store answered one request, or did not. On the delivering thread if the request was
        the renewer's."""

    def traceparent(self, use: LockUse) -> str:
        """An acquire begins: the W3C ``traceparent`` to keep with it in the store, or ""."""
        return ""

    def wants_holder(self, use: LockUse) -> bool:
        """Whether an acquire that begins to wait is to send one more request, to name the
        holder in ``waiting``."""
        return False


installed: list[Observer] = []
"""Observers of all clients of the process that are made from now on."""
_clients: set[ref[Events]] = set()
"""No WeakSet: that can't be read while another thread makes or drops a client."""
_blocks: ContextVar[tuple[LockUse, ...]] = ContextVar("holdfast_blocks", default=())
_kinds: set[str] = set()


def limited(kind: str) -> str:
    """The kind, or "other" if the process has a hundred others already: the labels of metrics must
    stay few."""
    if kind in _kinds:
        return kind
    if len(_kinds) < MOST_KINDS:
        _kinds.add(kind)
        return kind
    if OTHER not in _kinds:
        _kinds.add(OTHER)
        text = "more than %d kinds of locks: %r and all new ones count as 'other'; give kind=…"
        log.warning(text, MOST_KINDS, kind, part="lock", kind=kind)
    return OTHER


def current() -> LockUse | None:
    """The innermost block of this thread or task whose lock is held; ``None`` if there is none, or
    if its client has no observers."""
    for use in reversed(_blocks.get()):
        if not use.ended:
            return use
    return None


def refused(fence: Fence, resource: str) -> None:
    """Tells every observer of the process that a guard has refused a fence."""
    observers = [*installed]
    for client in _clients.copy():  # one step of the interpreter, as are add and discard
        if (events := client()) is not None:
            observers += events.observers
    tell(
        list({id(observer): observer for observer in observers}.values()),
        FenceRefused(resource, fence),
    )


_raised: dict[tuple[int, str], Observer] = {}
"""Observers that have raised, by their ids and methods. They are kept, so that no other observer
gets the same id."""


def tell(observers: Iterable[Observer], *events: AnyEvent) -> None:
    """Calls each observer with each event. An exception of an observer is logged once, and goes no
    further. If an interrupt comes while an observer runs, the other observers are still called, so
    that their counts stay right; then the interrupt is raised."""
    _call_each(iter([(observer, event) for event in events for observer in observers]))


def _call_each(calls: Iterator[tuple[Observer, AnyEvent]]) -> None:
    try:
        for observer, event in calls:
            try:
                getattr(observer, event.word)(event)
            except Exception:  # noqa: BLE001 - user code must not break locking
                _observer_raised(observer, event.word)
    except BaseException:
        _call_each(calls)
        raise


def _observer_raised(observer: Observer, word: str) -> None:
    key = id(observer), word
    if key not in _raised:
        _raised[key] = observer
        text = "%s of the observer %s raised; this is logged once, and locking goes on"
        log.exception(text, word, type(observer).__name__)


def _checked(traceparent: object) -> str:
    """The text to store: empty, or of the form that readers accept. Raises ``ValueError``."""
    if traceparent and not is_traceparent(traceparent):
        raise ValueError(f"no W3C traceparent of version 00: {traceparent!r:.80}")
    return str(traceparent or "")


class Events:
    """Tells the observers of one client what happens in it."""

    def __init__(
        self,
        observers: Sequence[Observer],
        store: str,
        now: Callable[[], float],
        later: Callable[[Callable[[Any], None], AnyEvent, bool], None],
        prepare: Callable[[], None],
    ) -> None:
        self.observers = tuple(observers)
        self.store = store
        self._now, self._later = now, later
        self._prepare = prepare
        """Makes sure that the delivering thread runs, on a thread that may start one."""
        self._down_since: float | None = None
        _clients.add(ref(self, _clients.discard))

    # One acquire and its hold. The first four run on the caller's thread or task.

    def begin(self, name: str, kind: str, mode: Mode, note: str, *, leads: bool) -> LockUse:
        """An acquire begins."""
        self._prepare()
        return LockUse(self.store, name, limited(kind), mode, note, self, self._now(), leads)

    def traceparent(self, use: LockUse) -> str:
        """The first that an observer gives for the acquire. All are asked: it is how an observer
        knows that an acquire begins."""
        texts = []
        for observer in self.observers:
            try:
                texts.append(_checked(observer.traceparent(use)))
            except Exception:  # noqa: BLE001 - user code must not break locking
                _observer_raised(observer, "traceparent")
            except BaseException as error:
                self.failed(use, error, lost=False)
                raise
        return next(filter(None, texts), "")

    def waiting(self, use: LockUse, place: int | None, holder: Holder | None) -> None:
        """It has to wait. Told once."""
        if not use.contended:
            use.contended = True
            tell(self.observers, WaitBegan(use, place, holder))

    def wants_holder(self, use: LockUse) -> bool:
        """Whether to look for a holder before ``waiting`` is told."""
        for observer in self.observers if not use.contended else ():
            try:
                if observer.wants_holder(use):
                    return True
            except Exception:  # noqa: BLE001 - user code must not break locking
                _observer_raised(observer, "wants_holder")
        return False

    def acquired(self, hold: Hold, *, block: bool) -> None:
        """It is held, and its lease exists: observers may take long, or take locks themselves."""
        use, now = hold.use, self._now()
        if use is None:
            return
        use.token, use.granted = hold.grant.token, now
        if block:
            _blocks.set((*(outer for outer in _blocks.get() if not outer.ended), use))
        use.tell_attempt()
        event = Acquired(use, now - use.began, max(0.0, hold.ends - now), use.contended)
        try:
            tell(self.observers, event, *([Leading(use, True)] if use.leads else []))
        finally:
            use.told = True
            if hold.reason:  # lost meanwhile: this was not told before
                self.lost(hold, hold.reason)

    def failed(self, use: LockUse, error: BaseException, *, lost: bool) -> None:
        """The acquire ends with an exception. If it was held already it was undone, or ``lost``,
        which is told by itself."""
        if use.told:
            if not lost:
                self._end(Released(use, self._now() - use.granted, None))
            return
        use.ended, seconds = True, self._now() - use.began
        if isinstance(error, LockTimeout):
            tell(self.observers, TimedOut(use, seconds, error.holder))
        else:
            tell(self.observers, Cancelled(use, seconds, _outcome(error), error))
        use.tell_attempt()

    def released(self, hold: Hold, ours: bool | None, *, later: bool = False) -> None:
        """It was released."""
        if hold.use is not None:
            event = Released(hold.use, self._now() - hold.use.granted, ours)
            if later:
                self._end_later(event)
            else:
                self._end(event)

    def doubtful(self, hold: Hold, reason: str) -> None:
        """Little certain time is left. On the watcher's thread: never waits."""
        use = hold.use
        if use is not None and use.doubtful_at != hold.doubtful_at:
            use.doubtful_at = hold.doubtful_at
            self._tell_later(Doubtful(use, max(0.0, hold.ends - self._now()), reason))

    def lost(self, hold: Hold, reason: str) -> None:
        """It was lost. On any thread: never waits. May be called twice for one loss."""
        if hold.use is not None:
            seconds = self._now() - (hold.use.granted or hold.since)
            self._end_later(Lost(hold.use, seconds, reason, cause_of(reason)))

    def _end_later(self, event: Released | Lost) -> None:
        self._later(self._end, event, True)  # kept: each hold has one, and gauges count them

    def _end(self, event: Released | Lost) -> None:
        """Tells the end of a hold: the first one only, and none if it was not told as held."""
        use = event.use
        if use.told and not use.ended:
            use.ended = True
            tell(self.observers, event, *([Leading(use, False)] if use.leads else []))

    # The store.

    def answered(self, operation: str, seconds: float) -> None:
        """The store has answered a request."""
        since, self._down_since = self._down_since, None
        if since is not None:
            self._tell_later(Reachable(self.store, self._now() - since))
        self._request(Requested(self.store, operation, seconds, ""))

    def unanswered(self, operation: str, sent: float, error: Exception) -> None:
        """The store has not answered a request that was sent at ``sent``."""
        now = self._now()
        if self._down_since is None and isinstance(error, BackendUnavailable):
            self._down_since = sent
            self._tell_later(Unreachable(self.store, str(error)))
        self._request(Requested(self.store, operation, now - sent, type(error).__name__))

    def _request(self, event: Requested) -> None:
        if event.operation in ("attempt", "release"):  # of a caller, on its own thread
            tell(self.observers, event)
        else:
            self._tell_later(event)

    def renewed(self, holds: int, waiters: int, seconds: float, failed: int, error: str) -> None:
        """A batch of renewals is over."""
        self._tell_later(Renewed(self.store, holds, waiters, seconds, failed, error))

    def broken(
        self, name: str, kind: str, tokens: Iterable[int], reason: str, holders: Iterable[Holder]
    ) -> None:
        """This client has broken a name."""
        event = Broken(self.store, name, limited(kind), tuple(tokens), reason, tuple(holders))
        tell(self.observers, event)

    def ran(self, key: str, kind: str, outcome: str) -> None:
        """A call of a job is over."""
        tell(self.observers, Ran(self.store, key, limited(kind), outcome))

    def _tell_later(self, event: AnyEvent) -> None:
        self._later(self._tell, event, False)

    def _tell(self, event: AnyEvent) -> None:
        tell(self.observers, event)


def _outcome(error: BaseException) -> str:
    if isinstance(error, BackendUnavailable):
        return "unreachable"
    return "failed" if isinstance(error, Exception) else "cancelled"


CAUSES = (
    ("expired", ("it could not be renewed in time", "its ttl is over", "its certain time is over")),
    ("max_hold", ("max_hold is over",)),
    ("closed", ("its client was closed",)),
    ("broken", ("it was broken",)),
)


def cause_of(reason: str) -> str:
    """The reason of a loss in one of few words, for the labels of metrics."""
    for cause, beginnings in CAUSES:
        if reason.startswith(beginnings):
            return cause
    if "the hold was broken" in reason:
        return "broken"
    words = ("session", "connection", "lease")
    return "session" if any(word in reason.lower() for word in words) else "gone"


def own_holder(engine: Engine, use: LockUse) -> Holder | None:
    """The holder of the name, if it is this very client: that needs no request."""
    for hold in list(engine.renewer.holds.values()):
        claim, now = hold.grant.claim, engine.runtime.now()
        if claim.name == use.name:
            since = engine.runtime.wall() - (now - hold.since)
            rest = hold.grant.token, hold.grant.slots, since, max(0.0, hold.ends - now)
            return Holder(*read_label(claim.label), claim.mode, *rest)
    return None
