"""What both clients share: settings, primitives, fork and exit."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

from holdfast.claim import (
    LARGEST_LIMIT,
    FenceKeys,
    Holder,
    Keys,
    LockInfo,
    Mode,
    check_epoch,
    check_name,
    escaped,
)
from holdfast.core import log
from holdfast.core.contract import Finding, Guarantee, Runtime, Settings, Store
from holdfast.core.engine import Engine
from holdfast.core.renewer import Renewer
from holdfast.durations import Duration, seconds, timeout_seconds
from holdfast.errors import GuaranteeNotMet, Unsupported
from holdfast.io import lifetime
from holdfast.io.threads import RenewerThread
from holdfast.one_process import OneProcess
from holdfast.primitives.lock import LockBase, ReadWriteLock
from holdfast.primitives.options import LockOptions, Options, check_ttl, make_options
from holdfast.url import open_store

if TYPE_CHECKING:
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

PAGE = 200
LONGEST_LIST = 100_000


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
    ) -> None:
        settings = Settings(_namespace(namespace), _count(connections, "connections"))
        store = open_store(url, settings)
        _check_required(store, require)
        self._defaults = LockOptions(
            check_ttl(seconds(ttl, "ttl"), store), timeout_seconds(timeout)
        )
        check_epoch(epoch)
        keys = FenceKeys(fence_keys)
        self._renewer_thread = RenewerThread(store)
        self._engine = Engine(
            store,
            runtime,
            self._renewer_thread.renewer,
            patience=seconds(patience, "patience"),
            epoch=epoch,
        )
        self._engine.fence_keys = keys
        self._engine.on_fork.append(self._renewer_thread.forked)
        lifetime.at_fork(self._engine)
        weakref.finalize(self._engine, _end, self._renewer_thread.renewer).atexit = False

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
        tokens = await self._engine.backend.revoke(name)
        if tokens:
            _log_broken(self._engine, name, reason, holders)
            self._engine.broke(name, tokens, escaped(reason))
        return max(tokens, default=None)

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


def _end(renewer: Renewer) -> None:
    """Ends the renewer: the client, its locks and its leases are all garbage."""
    renewer.close()


def _log_broken(engine: Engine, name: str, reason: str, holders: Sequence[Holder]) -> None:
    held_by = "; ".join(str(holder) for holder in holders) or "unknown"
    why = escaped(reason)  # often what a person typed into a form
    log.warning("broke %r on %s, held by %s: %s", name, engine.store.display, held_by, why)


def _namespace(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"namespace is text, not {type(text).__name__}")
    check_name(text)
    if len(text) > 64 or not all(c.isalnum() or c in "-_.:" for c in text) or not text.isascii():
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
