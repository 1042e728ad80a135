"""The lock: a reusable, shareable description; what is held is the lease that it gives."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import ref

from holdfast.claim import Claim, Mode
from holdfast.core.acquire import acquire, attempt_once
from holdfast.core.drive import run_now
from holdfast.core.hold import Ask, Hold, State
from holdfast.durations import Duration, timeout_seconds
from holdfast.errors import AlreadyHeld, LockTimeout, NotHeld
from holdfast.lease import Lease, LeaseBase
from holdfast.primitives.block import Entered, WayOut

if TYPE_CHECKING:
    from holdfast.core.engine import Engine
    from holdfast.primitives.terms import Terms

__all__ = ["UNSET", "Lock", "LockBase"]

L = TypeVar("L", bound=LeaseBase)
F = TypeVar("F", bound=Callable[..., Any])


class LockBase(Entered[L]):
    """What both clients' locks share: everything but the words ``with`` and ``await``."""

    __slots__ = (
        "__weakref__",
        "_ask",
        "_bare",
        "_limit",
        "_mode",
        "_terms",
        "_weight",
        "name",
    )

    _lease: type[L]

    def __init__(
        self, engine: Engine, name: str, terms: Terms, mode: Mode, weight: int = 1, limit: int = 0
    ) -> None:
        super().__init__(engine)
        self.name = name
        self._terms = terms
        self._ask = Ask(terms.timeout, terms.renew, terms.max_hold)
        self._mode, self._weight, self._limit = mode, weight, limit
        self._bare: dict[Callable[[], Any], list[LeaseBase]] = {}
        """What ``acquire`` gave, by thread or task: who ends leaves nothing here."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self._mode} on {self._engine.store.display}>"

    def __call__(self, function: F) -> F:
        """Runs the function under the lock; ``LockLost.result`` is its result if it finished."""
        from holdfast.primitives.decorate import decorate

        return decorate(self, function)

    def _named(self, name: str) -> Self:
        """The same lock of another name, for decorated calls."""
        return type(self)(self._engine, name, self._terms, self._mode, self._weight, self._limit)

    async def _take(self, timeout: float | None, *, block: bool, explain: bool = True) -> L:
        engine, terms = self._engine, self._terms
        engine.enter()
        me = engine.runtime.me()
        outer = engine.held_by(me, self.name) if engine.mine else None
        if outer is not None and self._mode is not Mode.SLOTS:
            again = self._again(outer, timeout, explain)
            if again is not None:
                again.nested = True  # before its handle is made: see Client.release_local
                again.tidy()
                lease = self._lease(engine, again, terms.note)
                if again.state is State.HELD:
                    return lease
                lease._released = True  # another thread ended the hold in this very moment
        claim = Claim(
            self.name,
            self._mode,
            self._weight,
            self._limit,
            terms.ttl,
            os.urandom(16).hex(),
            engine.label(me, terms.note),
        )
        ask = self._ask
        if not explain or timeout != ask.timeout:
            ask = Ask(timeout, terms.renew, terms.max_hold, explain)
        try:
            hold = await (attempt_once if timeout == 0 else acquire)(engine, claim, ask)
            engine.own(hold, me)
            hold.block = block  # kept alive from here on only while this thread or task lives
            return self._lease(engine, hold, terms.note)
        except BaseException:
            if claim.owner in engine.renewer.holds:  # interrupted between the grant and its lease
                await engine.undo(claim)
            raise

    def _again(self, outer: Hold, timeout: float | None, explain: bool) -> Hold | None:
        """This thread or task has the name: re-enters, raises, or finds that it has it no more."""
        if outer.state is not State.HELD or self._engine.runtime.now() >= outer.ends:
            self._engine.disown(outer)
            return None
        if not outer.handled():  # an interrupt tore its release apart
            self._engine.disown(outer)
            self._engine.renewer.drop(outer)
            return None
        claim = outer.grant.claim
        if claim.mode is Mode.SLOTS:
            return None  # the store tells that a semaphore is no lock
        if self._terms.reentrant and claim.mode is self._mode:
            return outer
        if timeout == 0 and not explain:
            raise LockTimeout("", name=self.name)
        held, hint = claim.mode, "take it with reentrant=True to nest"
        if claim.mode is not self._mode:
            hint = "release it first"
        raise AlreadyHeld(
            f"this {self._engine.who} holds {self.name!r} on {self._engine.store.display} already "
            f"({held}), and would wait for itself: {hint}"
        )

    async def _acquire(self, blocking: bool, timeout: Duration | None) -> L | None:
        limit = self._terms.timeout if timeout is UNSET else timeout_seconds(timeout)
        if not blocking:
            limit = 0
        try:
            lease = await self._take(limit, block=False, explain=False)
        except LockTimeout:
            return None
        who = lease._hold.who
        stack = self._bare.get(who)
        if stack is None:
            # The lock is known weakly: what it gave is let go as soon as nobody has either.
            stack = self._bare[ref(who(), partial(_ended, ref(self)))] = []
        stack.append(lease)
        lease._taken_through = ref(self)
        return lease

    def _forget(self, lease: LeaseBase) -> None:
        """A lease that came from ``acquire`` has been given up."""
        stack = self._bare.get(lease._hold.who)
        if stack and lease in stack:
            stack.remove(lease)

    async def _release(self) -> None:
        """Ends the newest lease that this thread or task took through this object."""
        stack = self._bare.get(ref(self._engine.runtime.me()))
        if not stack:
            raise NotHeld(
                f"this {self._engine.who} holds no lease of {self.name!r} "
                f"on {self._engine.store.display} that came from this lock's acquire()"
            )
        lease = stack.pop()
        lease._taken_through = None
        await lease._release()

    async def _locked(self) -> bool:
        self._engine.enter()
        standing = await self._engine.backend.look(self.name)
        if self._mode is Mode.SLOTS:
            taken = sum(len(holder.slots) for holder in standing.holders)
            return taken + self._weight > self._limit
        modes = {holder.mode for holder in standing.holders}
        return bool(modes - {Mode.SHARED}) if self._mode is Mode.SHARED else bool(modes)


def _ended(lock: ref[LockBase[Any]], who: ref[Any]) -> None:
    """In a destructor: a thread or task is gone."""
    found = lock()
    if found is not None:
        found._bare.pop(who, None)


class _Unset:
    """The lock's own timeout."""

    def __repr__(self) -> str:
        return "the lock's"


UNSET: Any = _Unset()


class Lock(LockBase[Lease]):
    """A lock of the blocking client. Any number of threads may use one object at once."""

    __slots__ = ()
    _lease = Lease

    def acquire(self, blocking: bool = True, timeout: Duration | None = UNSET) -> Lease | None:
        """A lease (which is true), or ``None`` if it was not acquired in time."""
        return run_now(self._acquire(blocking, timeout))

    def release(self) -> None:
        """Ends the newest lease that this thread took through this object; else ``NotHeld``."""
        run_now(self._release())

    def locked(self) -> bool:
        """Whether an attempt would have to wait at this moment."""
        return run_now(self._locked())

    def __enter__(self) -> Lease:
        block = self._begin()
        lease = run_now(self._take(self._terms.timeout, block=True))
        try:
            self._opened(block, lease)
        except BaseException:
            lease._drop()
            raise
        return lease

    def _leave(self, lease: Lease | None, error: BaseException | None) -> None:
        lease = self._closing(lease)
        if not run_now(lease._release_block()) and error is None:
            raise lease._lost_error()

    if TYPE_CHECKING:

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None: ...
    else:
        __exit__ = WayOut()
