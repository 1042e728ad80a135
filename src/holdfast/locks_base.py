"""What both clients share: settings, primitives, fork and exit."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, cast

from holdfast.claim import (
    LARGEST_LIMIT,
    Claim,
    FenceKeys,
    Grant,
    Holder,
    Keys,
    LockInfo,
    Mode,
    check_epoch,
    check_name,
    escaped,
)
from holdfast.core import log
from holdfast.core.breaking import note_name, note_text
from holdfast.core.contract import Finding, Guarantee, Runtime, Settings, Store
from holdfast.core.engine import Engine
from holdfast.core.renewer import Renewer
from holdfast.durations import Duration, seconds, timeout_seconds
from holdfast.errors import GuaranteeNotMet, HoldfastError, Unsupported
from holdfast.io import lifetime
from holdfast.io.threads import RenewerThread
from holdfast.lease import LeaseBase
from holdfast.one_process import OneProcess
from holdfast.primitives.lock import LockBase, ReadWriteLock
from holdfast.primitives.options import (
    LockOptions,
    Options,
    TakeOverOptions,
    check_ttl,
    make_options,
    refuse_unknown,
)
from holdfast.url import open_store

if TYPE_CHECKING:
    from holdfast.core.events import Events, Observer
    from holdfast.primitives.election import ElectionBase
    from holdfast.primitives.every import EveryRules, Missed
    from holdfast.primitives.multi import MultiLockBase
    from holdfast.primitives.once_job import Errors, JobBase

    M = TypeVar("M", bound=MultiLockBase[Any])
    E = TypeVar("E", bound=ElectionBase[Any])
    J = TypeVar("J", bound=JobBase[Any])
    V = TypeVar("V", bound=EveryRules[Any])
else:  # see holdfast.lazy
    M, E, J, V = TypeVar("M"), TypeVar("E"), TypeVar("J"), TypeVar("V")

__all__ = ["LocksBase"]

K = TypeVar("K", bound=LockBase[Any])
L = TypeVar("L", bound=LeaseBase)

PAGE = 200
LONGEST_LIST = 100_000
NOTE_TTL_SECONDS = 10.0
"""The ttl of the hold under which the reason of a break is recorded."""
NOTE_SECONDS = 2.0
"""How long a break waits until the reason is recorded."""
KEEP_NOTE_SECONDS = 3600.0
"""How long that record is kept after the end that the broken hold had in the store."""
LONGEST_NOTE_SECONDS = 24 * 3600.0


class LocksBase(OneProcess, Generic[K, M, E, J, V]):
    """The base of ``Locks`` and ``AsyncLocks``: all that needs no ``await`` in a public method."""

    _lock: type[K]
    _multi: type[M]
    _election: type[E]
    _once: type[J]
    _every: type[V]

    def __init__(
        self,
        url: str | object,
        runtime: Runtime,
        *,
        ttl: Duration = 30,
        timeout: Duration | None = None,
        namespace: str = "holdfast",
        require: Iterable[str | Guarantee] = (),
        patience: Duration = 30,
        connections: int = 4,
        epoch: int = 0,
        fence_keys: Keys = (),
        observers: Iterable[Observer] = (),
    ) -> None:
        settings = Settings(_namespace(namespace), _count(connections, "connections"))
        store = self._open(url, settings)
        _check_required(store, require)
        self._defaults = LockOptions(
            check_ttl(seconds(ttl, "ttl"), store), timeout_seconds(timeout)
        )
        check_epoch(epoch)
        keys = FenceKeys(fence_keys)
        self._renewer_thread = self._new_renewer(store)
        self._engine = Engine(
            store,
            runtime,
            self._renewer_thread.renewer,
            patience=seconds(patience, "patience"),
            epoch=epoch,
        )
        self._engine.namespace, self._engine.fence_keys = settings.namespace, keys
        self._engine.log_events = partial(_log_events, weakref.ref(self._engine))
        _observe(self._engine, observers)
        self._engine.on_fork.append(self._renewer_thread.forked)
        lifetime.at_fork(self._engine)
        weakref.finalize(self._engine, _end, self._renewer_thread.renewer).atexit = False

    # A client of ``holdfast.testing`` has another store, and a renewer in virtual time.

    def _open(self, url: str | object, settings: Settings) -> Store:
        return open_store(url, settings)

    def _new_renewer(self, store: Store) -> RenewerThread:
        return RenewerThread(store)

    @property
    def guarantees(self) -> frozenset[Guarantee]:
        """The store's guarantees."""
        return self._engine.store.guarantees

    def __repr__(self) -> str:
        if not hasattr(self, "_engine"):  # error reporters show the variables of a failed connect()
            return f"<{type(self).__name__}, not open>"
        state = ", closed" if self._engine.closed else ""
        return f"<{type(self).__name__} {self._engine.store.display}{state}>"

    def lock(self, name: str, **options: Unpack[Options]) -> K:
        """An exclusive lock: one holder at a time.

        The options, which every primitive takes:

        - ``ttl``: how long a hold lasts without renewal; the client's default is 30 s
        - ``timeout``: how long to wait; ``None`` for ever, 0 tries once. (In redis-py the word
          means the ttl.)
        - ``renew``: ``False`` if the hold is to end after its ttl, also if its block goes on
        - ``reentrant``: ``True`` if the thread or task that holds it may acquire it again
        - ``max_hold``: a limit of the total time, renewed or not
        - ``note``: text that others see beside the hold
        - ``kind``: one word for many names, as a label of metrics; without it, the text before the
          first colon of the name

        Durations are seconds or a ``timedelta``. Raises ``TypeError`` or ``ValueError`` for an
        option that does not exist or does not fit; contacts nothing.
        """
        return self._make(name, Mode.EXCLUSIVE, options)

    def rwlock(self, name: str, **options: Unpack[Options]) -> ReadWriteLock[K]:
        """``.read()`` is shared, ``.write()`` is exclusive; a waiting writer is not starved.

        Takes the options of ``lock``.
        """

        self._need(Guarantee.SHARED, "rwlock()")
        return ReadWriteLock(self._lock, self._engine, check_name(name), self._checked(options))

    def semaphore(
        self, name: str, limit: int, *, permits: int = 1, **options: Unpack[Options]
    ) -> K:
        """``permits`` of ``limit`` slots; ``lease.slots`` are their numbers.

        Takes the options of ``lock``.
        """
        self._need(Guarantee.SLOTS, "semaphore()")
        _count(limit, "limit", LARGEST_LIMIT)
        if _count(permits, "permits") > limit:
            raise ValueError(f"permits={permits} is more than the limit of {limit}")
        return self._make(name, Mode.SLOTS, options, permits, limit)

    def multi(self, names: Iterable[str], **options: Unpack[Options]) -> M:
        """Several exclusive locks at once: all or none. Takes the options of ``lock``."""
        return self._multi(self._engine, names, self._checked(options))

    def election(self, name: str, **options: Unpack[Options]) -> E:
        """An election: ``campaign()``, ``leader()``, ``observe()``, ``resign()``.

        Takes the options of ``lock``; the ``note`` is what others see of the leader.
        """
        return self._election(self._engine, check_name(name), self._checked(options))

    def once(
        self,
        key: str,
        *,
        keep: Duration = 7 * 24 * 3600,
        errors: Errors = "retry",
        wait: bool = True,
        stale_for: Duration = 0,
        **options: Unpack[Options],
    ) -> J:
        """A job that runs once per key, with its outcome recorded for ``keep``.

        A job that raised is run again by the next caller, or its error is recorded
        (``errors="record"``). A caller that finds it running waits for its outcome, or skips it
        (``wait=False``). A run that crashed is taken over. Takes the options of ``lock``, too.

        With ``stale_for`` the value is for a cache: after ``keep`` one caller runs the job again,
        and those that come meanwhile get the old value at once, for so long after ``keep``.
        """
        from holdfast.primitives.once_job import make_plan

        self._need(Guarantee.RECORDS, "once()")
        longer = seconds(stale_for, "stale_for", zero=True)
        plan = make_plan(seconds(keep, "keep"), errors, wait, longer)
        return self._once(self._engine, key, self._checked(options), plan)

    def every(
        self,
        interval: Duration,
        name: str,
        *,
        offset: Duration = 0,
        missed: Missed = "one",
        grace: Duration | None = None,
        errors: Errors = "record",
        wait: bool = False,
        **options: Unpack[Options],
    ) -> V:
        """A job that runs once per interval, counted from the epoch (UTC) plus ``offset``.

        Missed intervals are run later by one run, by one run each (``missed="all"``) or not at all
        (``missed="skip"``: a run starts within ``grace`` of its interval's start, or is skipped).
        Takes the options of ``lock``, too.
        """
        from holdfast.primitives.every import make_timetable
        from holdfast.primitives.once_job import make_plan

        self._need(Guarantee.RECORDS, "every()")
        timetable = make_timetable(interval, offset, missed, grace)
        plan = make_plan(timetable.keep_seconds, errors, wait)
        return self._every(self._engine, name, self._checked(options), plan, timetable)

    def _make(self, name: str, mode: Mode, options: Options, weight: int = 1, limit: int = 0) -> K:
        checked = self._checked(options)
        return self._lock(self._engine, check_name(name), checked, mode, weight, limit)

    def _checked(self, options: Options) -> LockOptions:
        if not options:
            return self._defaults
        return make_options(self._defaults, self._engine.store, options)

    def _need(self, guarantee: Guarantee, what: str) -> None:
        if guarantee not in self.guarantees:
            store = self._engine.store.display
            raise Unsupported(f"{store} can't do {what}: it does not guarantee {guarantee}")

    async def _list(self, prefix: str, limit: int) -> list[LockInfo]:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix is text, not {type(prefix).__name__}")
        _count(limit, "limit")
        self._engine.enter()
        found: dict[str, LockInfo] = {}
        cursor: str | None = None
        while len(found) < limit:
            page = await self._engine.backend.survey(prefix, cursor, min(PAGE, limit))
            found |= {info.name: info for info in page.infos}
            cursor = page.cursor
            if cursor is None:
                break
        return sorted(list(found.values())[:limit])

    async def _inspect(self, name: str) -> LockInfo:
        self._engine.enter()
        return await self._engine.backend.look(check_name(name))

    async def _break_lock(self, name: str, reason: str) -> int | None:
        self._engine.enter()
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError("break_lock() needs a reason: it is logged with the holders")
        holders: Sequence[Holder] = (await self._engine.backend.look(check_name(name))).holders
        if holders and Guarantee.RECORDS in self._engine.store.guarantees:
            note = _note_break(self._engine, name, reason, holders)
            await self._engine.runtime.within(note, NOTE_SECONDS)
        tokens = await self._engine.backend.revoke(name)
        if tokens:
            _log_broken(self._engine, name, reason, holders)
            self._engine.broke(name, tokens, escaped(reason))
            if self._engine.events is not None:
                kind = LockInfo(name, 0, tuple(holders), ()).kind
                self._engine.events.broken(name, kind, tokens, reason, holders)
        return max(tokens, default=None)

    async def _take_over(self, lease: type[L], text: str, options: TakeOverOptions) -> L:
        from holdfast.handed_over import take_over

        refuse_unknown(options, TakeOverOptions.__annotations__)
        checked = self._checked(cast("Options", options))
        return await take_over(self._engine, lease, text, checked)

    async def _check(self) -> list[Finding]:
        self._engine.enter()
        findings = await self._engine.backend.probe()
        broken = [finding for finding in findings if finding.level == "broken"]
        if broken:
            details = "; ".join(f"{finding.subject}: {finding.detail}" for finding in broken)
            raise GuaranteeNotMet(f"{self._engine.store.display} breaks its guarantees: {details}")
        return findings

    def _still_held(self) -> list[str]:
        return [hold.grant.claim.name for hold in list(self._engine.renewer.holds.values())]

    def _warn_held(self, names: Iterable[str]) -> None:
        """Warns of each name. Called last: where warnings are errors, the first one ends
        ``close``."""
        for name in names:
            message = f"{name!r} was still held when its client was closed: released"
            warnings.warn(message, ResourceWarning, stacklevel=4)


def _observe(engine: Engine, observers: Iterable[Observer]) -> None:
    """Connects the client with its observers, and with those of the whole process. Without any of
    them nothing is imported."""
    named = os.environ.get("HOLDFAST_OBSERVE", "")
    if observers or named or "holdfast.core.events" in sys.modules:
        from holdfast.observe.wiring import events_of

        engine.events = engine.renewer.events = events_of(engine, observers, named)


def _log_events(engine: weakref.ref[Engine]) -> Events:
    """Makes the log the only observer of a client: its lines are wanted at DEBUG."""
    from holdfast.observe.wiring import log_events_of

    client = engine()
    assert client is not None
    client.events = client.renewer.events = log_events_of(client)
    return client.events


def _end(renewer: Renewer) -> None:
    """Ends the renewer: the client, its locks and its leases are all garbage."""
    renewer.close()


async def _note_break(engine: Engine, name: str, reason: str, holders: Sequence[Holder]) -> None:
    """Records the reason for the holders, before they are broken. A failure is only logged, and the
    caller does not wait for long: nothing of this may keep anybody from breaking a lock."""
    store, me = engine.store, engine.runtime.me()
    ttl = min(max(NOTE_TTL_SECONDS, store.shortest_ttl), store.longest_ttl)
    host, pid = engine.runtime.where()
    text = note_text([holder.token for holder in holders], f"{host} pid {pid}", reason)
    left = max(holder.remaining for holder in holders)
    keep = KEEP_NOTE_SECONDS + min(left, LONGEST_NOTE_SECONDS)
    owner, label = os.urandom(16).hex(), engine.label(me, "")
    claim = Claim(note_name(name), Mode.EXCLUSIVE, 1, 0, ttl, owner, label)
    over = False
    try:
        until = engine.runtime.now() + NOTE_SECONDS
        answer = await engine.backend.attempt(claim, join=False, until=until)
        if isinstance(answer, Grant):  # else another client breaks the name, with its own reason
            await engine.backend.record(answer, text, keep)
            await engine.backend.release(answer)
        over = True
    except HoldfastError as error:
        text = "the holder of %r on %s is not told the reason: %s"
        log.info(text, name, store.display, error, part="lock")
    finally:
        if not over:
            engine.renewer.undo(claim)


def _log_broken(engine: Engine, name: str, reason: str, holders: Sequence[Holder]) -> None:
    held_by = "; ".join(str(holder) for holder in holders) or "unknown"
    why = escaped(reason)  # often what a person typed into a form
    store, about = engine.store.display, {"event": "broken", "name": name, "reason": why}
    log.warning(
        "broke %r on %s, held by %s: %s", *(name, store, held_by, why), part="lock", **about
    )


def _namespace(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"namespace is text, not {type(text).__name__}")
    letters = all(c.isalnum() or c in "-_.:" for c in text)
    if not 0 < len(text) <= 64 or not letters or not text.isascii():
        raise ValueError(
            f"namespace has 1 to 64 letters, digits and -_.: of ASCII; not {text[:80]!r}"
        )
    return text


def _count(number: int, word: str, largest: int = 1_000_000) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= largest:
        raise ValueError(f"{word} is a whole number from 1 to {largest:,}; not {number!r:.40}")
    return number


def _check_required(store: Store, require: Iterable[str | Guarantee]) -> None:
    if not isinstance(require, Iterable):
        raise TypeError(f"require is names of guarantees, not {type(require).__name__}")
    wanted = (require,) if isinstance(require, str) else tuple(require)
    for word in wanted:
        try:
            guarantee = Guarantee(word)
        except ValueError:
            known = ", ".join(Guarantee)
            raise ValueError(f"require={word!r}: no such guarantee; known are {known}") from None
        if guarantee not in store.guarantees:
            promised = ", ".join(sorted(store.guarantees))
            raise GuaranteeNotMet(
                f"{store.display} does not guarantee {guarantee}; it guarantees {promised}"
            )
