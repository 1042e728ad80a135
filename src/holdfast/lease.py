"""The lease: a handle to a hold. All state of the hold is read from here, at each call.

``Lease`` and ``AsyncLease`` differ in three methods only: ``release``, ``extend`` and ``hand_over``
of an ``AsyncLease`` are awaited.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from holdfast.claim import Claim, Fence, Mode
from holdfast.core.drive import run_now
from holdfast.core.hold import Hold, State
from holdfast.durations import Duration, seconds, shown
from holdfast.errors import LockLost
from holdfast.one_process import OneProcess

if TYPE_CHECKING:
    from holdfast.core.engine import Engine
    from holdfast.core.events import LockUse

__all__ = ["AsyncLease", "Lease", "LeaseBase", "not_acquired", "tell_acquired"]


class Scope(Protocol):
    """The block of a task that is cancelled before the lease runs out."""

    reason: str

    def close(self, error: BaseException | None) -> bool: ...


class Acquirer(Protocol):
    """The lock whose ``acquire`` made the lease, and whose ``release`` may end it."""

    def _forget(self, lease: LeaseBase) -> None: ...


class LeaseBase(OneProcess):
    """A handle to a hold. It never blocks, except to release or extend."""

    __slots__ = (
        "__weakref__",
        "_acquired_through",
        "_engine",
        "_hold",
        "_note",
        "_released",
        "_scope",
    )

    def __init__(self, engine: Engine, hold: Hold, note: str) -> None:
        self._engine, self._hold, self._note = engine, hold, note
        self._acquired_through: ref[Acquirer] | None = None
        self._scope: Scope | None = None
        self._released = False
        hold.handles.append(ref(self))

    @property
    def _acquired_by(self) -> Hashable:
        return self._hold.acquired_by()

    @property
    def name(self) -> str:
        """The name that is locked."""
        return self._hold.grant.claim.name

    @property
    def mode(self) -> Mode:
        """Exclusive, shared or slots."""
        return self._hold.grant.claim.mode

    @property
    def token(self) -> int:
        """The fencing token: greater than that of every earlier exclusive hold of the name."""
        return self._hold.grant.token

    @property
    def slots(self) -> tuple[int, ...]:
        """Which slots of a semaphore are held."""
        return self._hold.grant.slots

    @property
    def fence(self) -> Fence:
        """What a resource checks; signed if the client has ``fence_keys``."""
        fence = Fence(self.name, self.mode, self.slots, self._engine.epoch, self.token)
        return self._engine.fence_keys.sign(fence)

    @property
    def ttl(self) -> float:
        """Seconds that the hold lasts without renewal."""
        return self._hold.grant.claim.ttl

    @property
    def note(self) -> str:
        """The text that other processes see beside this hold."""
        return self._note

    @property
    def remaining(self) -> float:
        """Seconds that are certain; 0 when it is not held."""
        if self._released or self._hold.state is not State.HELD:
            return 0.0
        return max(0.0, self._hold.ends - self._engine.runtime.now())

    @property
    def held(self) -> bool:
        """Whether it is certain at this moment that the hold is ours."""
        return self.remaining > 0

    @property
    def doubtful(self) -> bool:
        """Whether renewal is overdue and little certain time is left: time to stop working."""
        return self.held and self._engine.runtime.now() >= self._hold.doubtful_at

    @property
    def lost(self) -> bool:
        """Whether the hold ended, or may have ended, before it was released."""
        if self._released or self._hold.state is not State.HELD:
            return self._hold.state is State.LOST
        return self.remaining == 0

    @property
    def reason(self) -> str:
        """Why it was lost; empty while it is not."""
        if not self.lost:
            return ""
        return self._hold.reason or "its certain time is over"

    def check(self, at_least: Duration = 0) -> None:
        """Raises ``LockLost`` unless that many seconds are certain.

        Right after a wait less of the ttl may be certain than later: some stores grant directly
        with the wake-up, for up to 15 s, and the renewer renews that within a second.
        """
        needed = seconds(at_least, "at_least", zero=True)
        remaining = self.remaining
        if remaining <= 0:
            raise self._lost_error()
        if remaining < needed:
            raise LockLost(
                f"{self.name!r}: {shown(remaining)} are certain, {shown(needed)} are needed",
                name=self.name,
                reason="too little certain time is left",
            )

    def _lost_error(self, result: object = None) -> LockLost:
        doubt = self._scope.reason if self._scope is not None else ""
        reason = self.reason or doubt or self._hold.reason or "it was released"
        message = f"{self.name!r} on {self._engine.store.display} is no longer held: {reason}"
        return LockLost(message, name=self.name, reason=reason, result=result)

    def _note_loss(self, error: BaseException) -> None:
        """Adds to the error of a block that its lock was lost meanwhile."""
        if isinstance(error, LockLost):
            return
        with suppress(Exception):  # an error that can't be changed is raised without the note
            error.add_note(f"the lock {self.name!r} was lost: {self.reason}")

    def on_lost(self, callback: Callable[[str], object]) -> None:
        """Calls ``callback(reason)`` once when the hold is lost; at once if it is lost already.

        An asyncio client calls it on its event loop, a blocking client on the one thread that the
        process keeps for callbacks. A slow callback delays other callbacks, and nothing else.
        """
        if not callable(callback):
            raise TypeError(f"on_lost() takes a function, not {type(callback).__name__}")
        hold = self._hold
        if self._released and not self.lost:
            return
        self._engine.prepare_callbacks()
        if self.lost:
            self._engine.call_back(callback, self.reason)
            return
        hold.callbacks.append(callback)
        if hold.state is State.LOST:  # lost at this moment
            hold.call_lost_callbacks()

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        state = "lost" if self.lost else "released" if self._released else "held"
        return f"<{type(self).__name__} {self.name!r} {self.mode} token {self.token}, {state}>"

    def _end_handle(self) -> bool:
        """Ends this handle; returns whether it was the last one of the hold."""
        self._released = True
        acquirer = None if self._acquired_through is None else self._acquired_through()
        if acquirer is not None:
            acquirer._forget(self)
        hold = self._hold
        if hold.nested and hold.has_handle():
            hold.block = False  # the handle that is left need not belong to a block
            return False
        return True

    async def _release(self) -> bool | None:
        if self._released:
            return False
        if not self._end_handle():
            return self._hold.state is State.HELD and self._engine.runtime.now() < self._hold.ends
        return await self._engine.release(self._hold)

    async def _release_block(self) -> bool:
        """At the end of a block: releases; false only if the hold is known to have been lost."""
        if self._hold.state is State.RELEASED:  # the user released it inside the block
            self._released = True
        return self._released or await self._release() is not False

    async def _extend(self, ttl: Duration | None) -> None:
        if self._released:
            raise self._lost_error()
        from holdfast.core.extend import extend
        from holdfast.primitives.options import check_ttl

        wanted = None if ttl is None else check_ttl(seconds(ttl, "ttl"), self._engine.store)
        await extend(self._engine, self._hold, wanted)

    async def _hand_over(self) -> str:
        if self._released:
            raise self._lost_error()
        from holdfast.handed_over import hand_over

        text = await hand_over(self._engine, self._hold)
        self._end_handle()
        return text

    def _drop(self) -> bool:
        """Lets the renewer release the hold; returns whether there was something to release."""
        if self._released or not self._end_handle():
            return False
        self._engine.disown(self._hold)
        if self._hold.state is State.LOST or self._engine.closed:
            return False
        self._engine.renewer.drop(self._hold)  # the renewer may have noticed by itself
        return True

    def __del__(self) -> None:
        # The attribute is missing if __init__ was interrupted.
        if not getattr(self, "_released", True) and self._drop():
            message = f"a lease on {self.name!r} was dropped without release(): released now"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=1)


class Lease(LeaseBase):
    """A hold that the blocking client acquired."""

    __slots__ = ()

    def release(self) -> bool | None:
        """Ends the hold. ``True``: this call ended it. ``False``: it had ended before. ``None``:
        unknown, because the store did not answer in time; what is left of it is removed later,
        or ends with its ttl. Never raises for a hold that has ended."""
        return run_now(self._release())

    def extend(self, ttl: Duration | None = None) -> None:
        """Renews now, with another ttl from now on if one is given. Raises ``LockLost`` if the hold
        is lost, ``BackendUnavailable`` if the store did not answer."""
        run_now(self._extend(ttl))

    def hand_over(self) -> str:
        """Ends this process's part in the hold and returns a text, with which ``take_over`` of a
        client in another process goes on with it. The text is a secret. From now on the hold lasts
        for one ttl, and nothing here renews, extends or releases it: a block around it is left
        without an error. Raises ``LockLost`` if the hold is lost, ``Unsupported`` if the store
        can't do it, ``BackendUnavailable`` if the store did not answer: see ``held``."""
        return run_now(self._hand_over())


class AsyncLease(LeaseBase):
    """A hold that the asyncio client acquired."""

    __slots__ = ()

    async def release(self) -> bool | None:
        """Ends the hold. ``True``: this call ended it. ``False``: it had ended before. ``None``:
        unknown, because the store did not answer in time; what is left of it is removed later,
        or ends with its ttl. Never raises for a hold that has ended."""
        return await self._release()

    async def extend(self, ttl: Duration | None = None) -> None:
        """Renews now, with another ttl from now on if one is given. Raises ``LockLost`` if the hold
        is lost, ``BackendUnavailable`` if the store did not answer."""
        await self._extend(ttl)

    async def hand_over(self) -> str:
        """Ends this process's part in the hold and returns a text, with which ``take_over`` of a
        client in another process goes on with it. The text is a secret. From now on the hold lasts
        for one ttl, and nothing here renews, extends or releases it: a block around it is left
        without an error. Raises ``LockLost`` if the hold is lost, ``Unsupported`` if the store
        can't do it, ``BackendUnavailable`` if the store did not answer: see ``held``."""
        return await self._hand_over()


def tell_acquired(lease: LeaseBase, use: LockUse, *, block: bool) -> None:
    """Tells observers of a new lease; raises ``LockLost`` if the hold has ended meanwhile."""
    engine = lease._engine
    use.events.acquired(lease._hold, block=block)
    if not lease.held:
        engine.renewer.check_ends(engine.runtime.now())  # the watcher may be late
        raise lease._lost_error()


async def not_acquired(
    engine: Engine, claim: Claim, use: LockUse | None, error: BaseException
) -> None:
    """Undoes what was granted before an interrupt, and tells observers how it ended."""
    hold = engine.renewer.holds.get(claim.owner)
    try:
        if hold is not None:
            for handle in hold.handles:
                if lease := handle():
                    lease._released = True  # its destructor has nothing to warn of
            await engine.undo(claim)
    finally:
        if use is not None:
            use.events.failed(use, error, lost=hold is None)
