"""The lock: a reusable, shareable description. The held thing is the lease that it gives."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Never, Self, TypeVar
from weakref import ref

from holdfast.claim import LONGEST_KIND, Claim, Mode, kind_of
from holdfast.core.acquire import acquire, attempt_once
from holdfast.core.drive import run_now
from holdfast.core.hold import AcquireOptions, Hold, State
from holdfast.durations import Duration, timeout_seconds
from holdfast.errors import AlreadyHeld, LockTimeout, NotHeld
from holdfast.lease import Lease, LeaseBase, not_acquired, tell_acquired
from holdfast.one_process import OneProcess
from holdfast.primitives.context import BlockExit, LockContext
from holdfast.primitives.options import refuse_unknown

if TYPE_CHECKING:
    from holdfast.core.engine import Engine
    from holdfast.core.events import Events, LockUse
    from holdfast.primitives.options import LockOptions

__all__ = ["UNSET", "Lock", "LockBase", "ReadWriteLock", "template_kind", "wait_seconds"]

L = TypeVar("L", bound=LeaseBase)
F = TypeVar("F", bound=Callable[..., Any])


class LockBase(LockContext[L]):
    """What the locks of both clients share: everything but the words ``with`` and ``await``."""

    __slots__ = (
        "__weakref__",
        "_acquire_options",
        "_bare",
        "_kind",
        "_leads",
        "_limit",
        "_mode",
        "_options",
        "_weight",
        "name",
    )

    _lease: type[L]

    def __init__(
        self,
        engine: Engine,
        name: str,
        options: LockOptions,
        mode: Mode,
        weight: int = 1,
        limit: int = 0,
    ) -> None:
        super().__init__(engine)
        self.name = name
        self._options = options
        self._acquire_options = AcquireOptions(options.timeout, options.renew, options.max_hold)
        self._mode, self._weight, self._limit = mode, weight, limit
        self._kind = options.kind
        """As the caller gave it; empty: the text before the first colon of the name."""
        self._leads = False
        """Whether the holder is the leader of an election."""
        self._bare: dict[Callable[[], Any], list[LeaseBase]] = {}
        """Leases that ``acquire`` gave, by weak reference to the thread or task. The entry goes
        away with the thread or task."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self._mode} on {self._engine.store.display}>"

    if not TYPE_CHECKING:  # a type checker must go on to refuse unknown attributes

        def __getattr__(self, word: str) -> object:
            from holdfast.primitives.spellings import missing_attribute

            raise missing_attribute(self, word, dir(self._lease))

    def __call__(self, function: F) -> F:
        """Decorates a function: it runs under the lock. ``LockLost.result`` is its result if it
        finished."""
        from holdfast.primitives.decorate import decorate

        return decorate(self, function)

    def _named(self, name: str) -> Self:
        """The same lock with another name, for decorated calls. Its kind is the template."""
        lock = type(self)(self._engine, name, self._options, self._mode, self._weight, self._limit)
        lock._kind = self._kind or template_kind(self.name, name)
        lock._leads = self._leads
        return lock

    async def _take(self, timeout: float | None, *, block: bool, explain: bool = True) -> L:
        engine, options = self._engine, self._options
        engine.enter()
        me = engine.runtime.me()
        outer = engine.held_by(me, self.name) if engine.reentry else None
        if outer is not None and self._mode is not Mode.SLOTS:
            hold = self._reenter(outer, timeout, explain)
            if hold is not None:
                hold.nested = True  # before its handle is made: see Engine.release_local
                hold.drop_dead_handles()
                lease = self._lease(engine, hold, options.note)
                if hold.state is State.HELD:
                    return lease
                lease._released = True  # another thread ended the hold at the same moment
        events = engine.observing()
        use = None if events is None else self._begin(events)
        claim = Claim(
            self.name,
            self._mode,
            self._weight,
            self._limit,
            options.ttl,
            os.urandom(16).hex(),
            engine.label(me, options.note, self._kind, use, waits=timeout != 0),
        )
        how = self._acquire_options
        if not explain or timeout != how.timeout or use is not None:
            how = AcquireOptions(timeout, options.renew, options.max_hold, explain, use)
        try:
            hold = await (attempt_once if timeout == 0 else acquire)(engine, claim, how)
            engine.own(hold, me, block=block)
            lease = self._lease(engine, hold, options.note)
            if use is not None:  # after its lease: observers may take long, or take locks
                tell_acquired(lease, use, block=block)
            return lease
        except BaseException as error:
            await not_acquired(engine, claim, use, error)
            raise

    def _begin(self, events: Events) -> LockUse:
        kind = self._kind or kind_of(self.name)
        return events.begin(self.name, kind, self._mode, self._options.note, leads=self._leads)

    def _reenter(self, outer: Hold, timeout: float | None, explain: bool) -> Hold | None:
        """This thread or task took the name before. Returns the hold to re-enter, or ``None`` if
        it no longer has the name; raises ``AlreadyHeld`` if it would wait for itself."""
        if outer.state is not State.HELD or self._engine.runtime.now() >= outer.ends:
            self._engine.disown(outer)
            return None
        if not outer.has_handle():  # an interrupt stopped its release half-way
            self._engine.disown(outer)
            self._engine.renewer.drop(outer)
            return None
        claim = outer.grant.claim
        if claim.mode is Mode.SLOTS:
            return None  # the store refuses a lock of a name that is a semaphore
        if self._options.reentrant and claim.mode is self._mode:
            return outer
        if timeout == 0 and not explain:
            raise LockTimeout("", name=self.name)
        held, hint = claim.mode, "take it with reentrant=True to nest"
        if claim.mode is not self._mode:
            hint = "release it first"
        raise AlreadyHeld(
            f"this {self._engine.caller_kind} holds {self.name!r} on {self._engine.store.display} "
            f"already ({held}), and would wait for itself: {hint}"
        )

    async def _acquire(
        self, blocking: bool, timeout: Duration | None, others: dict[str, Never]
    ) -> L | None:
        limit = wait_seconds(blocking, timeout, self._options.timeout, others)
        try:
            lease = await self._take(limit, block=False, explain=False)
        except LockTimeout:
            return None
        caller = lease._hold.acquired_by
        stack = self._bare.get(caller)
        if stack is None:
            # A weak reference to the lock: a lease is dropped once neither it nor its lock is used.
            stack = self._bare[ref(caller(), partial(_ended, ref(self)))] = []
        stack.append(lease)
        lease._acquired_through = ref(self)
        return lease

    def _forget(self, lease: LeaseBase) -> None:
        """A lease that came from ``acquire`` has been released or dropped."""
        stack = self._bare.get(lease._hold.acquired_by)
        if stack and lease in stack:
            stack.remove(lease)

    async def _release(self) -> None:
        """Ends the newest lease that this thread or task acquired through this object."""
        stack = self._bare.get(ref(self._engine.runtime.me()))
        if not stack:
            raise NotHeld(
                f"this {self._engine.caller_kind} holds no lease of {self.name!r} "
                f"on {self._engine.store.display} that came from this lock's acquire()"
            )
        lease = stack.pop()
        lease._acquired_through = None
        await lease._release()

    async def _locked(self) -> bool:
        self._engine.enter()
        info = await self._engine.backend.look(self.name)
        if self._mode is Mode.SLOTS:
            taken = sum(len(holder.slots) for holder in info.holders)
            return taken + self._weight > self._limit
        modes = {holder.mode for holder in info.holders}
        return bool(modes - {Mode.SHARED}) if self._mode is Mode.SHARED else bool(modes)


def template_kind(template: str, name: str) -> str:
    """The kind of a decorated call: the template, unless it has no fields and so is the name."""
    return "" if template == name else template[:LONGEST_KIND]


def _ended(lock: ref[LockBase[Any]], caller: ref[Any]) -> None:
    """Runs in a destructor: a thread or task is gone."""
    found = lock()
    if found is not None:
        found._bare.pop(caller, None)


class _Unset:
    """Stands for the timeout that the lock was made with."""

    def __repr__(self) -> str:
        return "the lock's"


UNSET: Any = _Unset()


def wait_seconds(
    blocking: bool, timeout: Duration | None, default: float | None, others: dict[str, Never]
) -> float | None:
    """How long ``acquire`` waits. Raises for arguments that do not exist or contradict."""
    if others:
        refuse_unknown(others, ("blocking", "timeout"))
    if blocking not in (True, False):  # 1 and 0 are equal to these
        what = f"blocking is True or False, not {blocking!r:.40}"
        raise TypeError(f"{what}; the time to wait is acquire(timeout=…)")
    limit = default if timeout is UNSET else timeout_seconds(timeout)
    if blocking:
        return limit
    if limit and timeout is not UNSET:
        raise ValueError("an acquire with blocking=False does not wait: it takes no timeout")
    return 0


class Lock(LockBase[Lease]):
    """A lock of the blocking client. Any number of threads may use one object at once."""

    __slots__ = ()
    _lease = Lease

    def acquire(
        self, blocking: bool = True, timeout: Duration | None = UNSET, **others: Never
    ) -> Lease | None:
        """Returns a lease (which is true), or ``None`` if it was not acquired in time."""
        return run_now(self._acquire(blocking, timeout, others))

    def release(self) -> None:
        """Ends the newest lease that this thread acquired through this object; else ``NotHeld``."""
        run_now(self._release())

    def locked(self) -> bool:
        """Whether an attempt would have to wait at this moment."""
        return run_now(self._locked())

    def __enter__(self) -> Lease:
        block = self._entering_block()
        lease = run_now(self._take(self._options.timeout, block=True))
        try:
            self._entered(block, lease)
        except BaseException:
            lease._drop()
            raise
        return lease

    def _exit_block(self, lease: Lease | None, error: BaseException | None) -> None:
        lease = self._exiting_lease(lease)
        if not run_now(lease._release_block()):
            if error is None:
                raise lease._lost_error()
            lease._note_loss(error)

    if TYPE_CHECKING:

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None: ...
    else:
        __exit__ = BlockExit()


K = TypeVar("K", bound=LockBase[Any])


class ReadWriteLock(OneProcess, Generic[K]):
    """The two locks of a name: readers share, writers are alone; a waiting writer is not starved.

    ``write()`` and ``lock()`` of one name are the same claim.
    """

    __slots__ = ("_engine", "_lock", "_options", "name")

    def __init__(self, lock: type[K], engine: Engine, name: str, options: LockOptions) -> None:
        self.name = name
        self._lock, self._engine, self._options = lock, engine, options

    def read(self) -> K:
        """A lock that readers share."""
        return self._lock(self._engine, self.name, self._options, Mode.SHARED)

    def write(self) -> K:
        """A lock that one writer holds alone."""
        return self._lock(self._engine, self.name, self._options, Mode.EXCLUSIVE)

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self.name!r} on {self._engine.store.display}>"
