"""The engine inside both clients: the backend, the renewer, the local queues, its holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING
from weakref import WeakMethod, ref

from holdfast.claim import Claim, FenceKeys, Grant, write_label
from holdfast.core import log
from holdfast.core.breaking import why_lost
from holdfast.core.contract import Backend, Exchanging, Runtime, Store
from holdfast.core.hold import AcquireOptions, Hold, State
from holdfast.core.local_queue import LocalQueues, LocalWaiter
from holdfast.core.renewer import LATEST_ARRIVAL_SECONDS, Renewer
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.core.events import Events, LockUse

__all__ = ["Engine"]

KEPT_LABELS = 1024
UNDO_WAIT_SECONDS = 0.25
"""How long a cancelled acquire waits for its own undo before it ends without it."""
UNDO_BACKUP_SECONDS = 2.0
"""When the renewer undoes a claim that the event loop should have undone by then."""


class Engine:
    """One client of one store. ``core.acquire`` acquires holds; their later life is here."""

    def __init__(
        self, store: Store, runtime: Runtime, renewer: Renewer, *, patience: float, epoch: int
    ) -> None:
        self.store, self.runtime, self.renewer = store, runtime, renewer
        self.patience, self.epoch = patience, epoch
        self.namespace = ""
        self.fence_keys = FenceKeys()
        self.backend: Backend = store.backend(runtime)
        self._exchanging = self.backend if isinstance(self.backend, Exchanging) else None
        self.local_queues = LocalQueues(runtime)
        self.reentry: dict[tuple[int, str], Hold] = {}
        """The newest hold by thread or task and name: for re-entry, and to find self-deadlocks."""
        self.blocks: dict[int, list[Hold]] = {}
        """The holds by the thread or task whose blocks they are, the oldest first: what it holds
        while it waits for another name. Only to name deadlocks: a race may leave one out."""
        self.releasing: set[str] = set()
        """Owners whose holds are being released at this moment."""
        self.closed = False
        self.call_back: Callable[[Callable[[str], object], str], None] = _call_now
        """Schedules a callback with a reason; never waits, and runs no user code itself."""
        self.prepare_callbacks: Callable[[], None] = lambda: None
        """Runs before a callback is registered; raises if it could never be called."""
        self.caller_kind = "thread"
        """What acquires through this client, for messages: "thread" or "task"."""
        self.on_enter: Callable[[Engine], None] | None = None
        self.on_fork: list[Callable[[], None]] = []
        self.events: Events | None = None
        """What tells the observers; ``None`` if there are none."""
        self.log_events: Callable[[], Events] | None = None
        """Makes ``events`` for the log alone, when its lines are wanted first."""
        self._labels: dict[tuple[str, str, str], str] = {}
        renewer.nudge = _weakly(WeakMethod(self.nudge))
        renewer.alive = runtime.alive  # the renewer runs on a thread, and knows no tasks

    def enter(self) -> None:
        """Runs before every request; raises ``HoldfastError`` if the client is closed."""
        if self.closed:
            raise HoldfastError(f"this client to {self.store.display} is closed")
        if self.on_enter is not None:
            self.on_enter(self)

    def observing(self) -> Events | None:
        """What tells the observers of an acquire that begins now, if there are any. The log is one
        if its lines are wanted at this moment."""
        if self.events is None and log.tracer("lock") is not None and self.log_events is not None:
            return self.log_events()
        return self.events

    def label(
        self,
        me: Hashable,
        note: str,
        kind: str = "",
        use: LockUse | None = None,
        *,
        waits: bool = False,
    ) -> str:
        """The label that the store keeps beside a claim: host, process, thread or task, note, the
        kind if the program gave one, the traceparent of an observer, and for a claim that ``waits``
        what its thread or task holds in blocks meanwhile."""
        name = self.runtime.name_of(me)
        holds = self._held_in_blocks(me) if waits and self.blocks else []
        traceparent = "" if use is None else use.events.traceparent(use)
        if traceparent or holds:
            return write_label(*self.runtime.where(), name, note, kind, traceparent, holds)
        label = self._labels.get((name, note, kind))
        if label is None:
            if len(self._labels) >= KEPT_LABELS:
                self._labels.clear()
            host, pid = self.runtime.where()
            label = self._labels[name, note, kind] = write_label(host, pid, name, note, kind)
        return label

    def _held_in_blocks(self, me: Hashable) -> list[tuple[str, int]]:
        """Name and token of each hold that only this thread or task can end, the newest first."""
        return [
            (hold.grant.claim.name, hold.grant.token)
            for hold in reversed(self.blocks.get(id(me), ()))
            if hold.block and hold.state is State.HELD and hold.acquired_by() is me
        ]

    def nudge(self, claim: Claim) -> None:
        """Makes a wait for this claim return now."""
        self.backend.nudge(claim)

    def take(self, grant: Grant, since: float, options: AcquireOptions) -> Hold | None:
        """Makes a hold from a grant and registers it with the renewer; ``None`` if its certain time
        is already over."""
        if grant.since is not None and grant.since < since:
            since = grant.since
        now = self.runtime.now()
        cap = None if options.max_hold is None else now + options.max_hold
        hold = Hold(grant, since, options.renew, cap, options.use)
        if now >= hold.ends:
            return None
        hold.call_back = self.call_back
        self.renewer.add(hold)
        if self.closed:  # while the request was under way
            raise HoldfastError(f"this client to {self.store.display} was closed")
        return hold

    def release_local(self, hold: Hold) -> bool:
        """Ends a hold in this process, without a request; true for exactly one caller."""
        if not self.renewer.remove(hold):
            return False
        hold.state = State.RELEASED
        # A re-entry makes its handle and then reads the state; we do the reverse. So at least one
        # of the two sees the other. If both do, the renewer finds the hold without a handle.
        if hold.nested and hold.has_handle():
            hold.state, hold.block = State.HELD, False
            self.renewer.add(hold)
            return False
        self.disown(hold)
        return True

    def disown(self, hold: Hold) -> None:
        """Removes the hold from re-entry."""
        key = hold.reentry_key
        if key is None:
            return
        if self.reentry.get(key) is hold:
            self.reentry.pop(key, None)
        blocks = self.blocks.get(key[0])
        if blocks is not None:
            blocks[:] = [each for each in blocks if each is not hold and each.state is State.HELD]
            if not blocks:
                self.blocks.pop(key[0], None)

    def own(self, hold: Hold, me: Hashable, *, block: bool) -> None:
        """Registers the hold for re-entry by this thread or task. That of a ``block`` is from here
        on renewed only while the thread or task lives."""
        hold.acquired_by = ref(me)
        hold.reentry_key = key = id(me), hold.grant.claim.name
        self.reentry[key] = hold
        if block:
            hold.block = True
            self.blocks.setdefault(key[0], []).append(hold)

    def held_by(self, me: Hashable, name: str) -> Hold | None:
        """The newest hold of the name that this thread or task acquired."""
        hold = self.reentry.get((id(me), name))
        return hold if hold is not None and hold.acquired_by() is me else None

    async def release(self, hold: Hold) -> bool | None:
        """Ends a hold. Returns whether it was still ours, or ``None`` if that is unknown: the store
        did not answer, or only to a repeated request.

        If another waiter of this client is next, release and attempt are one exchange, where the
        store has that.
        """
        claim = hold.grant.claim
        next_waiter: LocalWaiter | None = None
        sent = self.runtime.now()
        try:
            try:  # begins before the local release: an interrupt anywhere in here is undone
                self.releasing.add(claim.owner)
                if not self.release_local(hold):
                    return await self._not_released(hold)
                if self._exchanging is not None:
                    next_waiter = self.local_queues.in_store_queue(claim.name)
                if self._exchanging is None or next_waiter is None:
                    ours = await self.backend.release(hold.grant)
                else:
                    ours, answer = await self._exchanging.exchange(hold.grant, next_waiter.claim)
                    await self._deliver(next_waiter, answer, sent)
            except GeneratorExit:  # the loop is gone: nothing can be awaited here
                self.renewer.undo(claim)
                raise
            except BaseException as error:  # noqa: BLE001 - raised there, unless it is the store's
                return await self._release_unknown(hold, next_waiter, sent, error)
            finally:
                self.releasing.discard(claim.owner)
            return await self._released(hold, ours, sent)
        except BaseException:
            if self.renewer.holds.get(claim.owner) is not hold:
                self._tell_released(hold, None)
            raise

    async def _release_unknown(
        self, hold: Hold, next_waiter: LocalWaiter | None, sent: float, error: BaseException
    ) -> bool | None:
        """The result of a release that was not answered, or was cancelled or interrupted: it may
        have arrived or not."""
        claim = hold.grant.claim
        try:
            if isinstance(error, HoldfastError):
                self._release_failed(claim, sent, error)
        finally:  # also after an interrupt in an observer
            if next_waiter is not None:
                self._exchange_failed(next_waiter)
            await self.undo(claim)
        if not isinstance(error, HoldfastError):
            raise error
        if sent >= hold.ends:
            self.renewer.declare_lost(hold, "its certain time is over")
            return False
        self._tell_released(hold, None)
        return None

    def _release_failed(self, claim: Claim, sent: float, error: HoldfastError) -> None:
        text, store = "releasing %r on %s failed: %s", self.store.display
        log.warning(text, claim.name, store, error, part="lock", store=store, name=claim.name)
        if self.events is not None:
            self.events.unanswered("release", sent, error)

    async def _released(self, hold: Hold, ours: bool | None, sent: float) -> bool | None:
        """The result of a release that the store has answered."""
        seconds = 0.0 if self.events is None else self.runtime.now() - sent
        if ours is False:
            reason = "the store no longer had it"
            try:
                told = await why_lost(self.runtime, self.backend, hold.grant, reason)
                reason = told or reason
            finally:  # also if it is cancelled here
                self.renewer.declare_lost(hold, reason)
        elif sent >= hold.ends:
            self.renewer.declare_lost(hold, "its certain time is over")
            ours = False
        if ours is None:
            name, store = hold.grant.claim.name, self.store.display
            text = "%r on %s is over; whether this release ended it is unknown"
            log.info(text, name, store, part="lock", store=store, name=name)
        if self.events is not None:  # last: an interrupt in an observer changes nothing of it
            self.events.answered("release", seconds)
            self._tell_released(hold, ours)
        return ours

    def _tell_released(self, hold: Hold, ours: bool | None) -> None:
        """Tells observers of the end, unless it is a loss, which the renewer tells."""
        if hold.use is not None and hold.state is not State.LOST:
            hold.use.events.released(hold, ours)

    async def _not_released(self, hold: Hold) -> bool:
        """The result of a release that had nothing to end here. Asks once more why the hold was
        lost, if the renewer could not wait for the answer."""
        if hold.reason_unread:
            hold.reason_unread = False
            told = await why_lost(self.runtime, self.backend, hold.grant, hold.reason)
            hold.reason = told or hold.reason
        return self._is_still_held(hold)

    def broke(self, name: str, tokens: Collection[int], reason: str) -> None:
        """This client has broken holds of the name: its own among them are lost now."""
        for hold in list(self.renewer.holds.values()):
            if hold.grant.claim.name == name and hold.grant.token in tokens:
                self.renewer.lose_and_undo(hold, f"it was broken through its own client: {reason}")
                self.disown(hold)

    def _is_still_held(self, hold: Hold) -> bool:
        """For a hold that this release did not end: true if it was re-entered, and ends with the
        other handle; false if the renewer no longer has it, and it is being lost."""
        if hold.state is State.HELD and self.renewer.holds.get(hold.grant.claim.owner) is hold:
            return True
        self.disown(hold)
        return False

    async def _deliver(self, waiter: LocalWaiter, answer: object, sent: float) -> None:
        """Gives the answer of an exchange to the waiter that it was for."""
        claim = waiter.claim
        if isinstance(answer, Grant):
            waiter.answer = answer, sent
            self.backend.nudge(claim)
        if not waiter.gone or claim.owner in self.renewer.holds:
            return
        # It left during the exchange, which queued its claim again or granted it.
        if claim.owner in self.releasing:
            # It had acquired by itself, and its own release is being sent: that goes first.
            self.renewer.undo(claim, after=LATEST_ARRIVAL_SECONDS, landed=True)
        else:
            await self.undo(claim)

    def _exchange_failed(self, waiter: LocalWaiter) -> None:
        """An exchange was not answered: it may have granted the waiter's claim, or may still do so
        after the waiter has left and its claim was undone."""
        waiter.unanswered = True
        claim = waiter.claim
        self.backend.nudge(claim)
        if waiter.gone and claim.owner not in self.renewer.holds:
            self.renewer.undo(claim, after=LATEST_ARRIVAL_SECONDS if waiter.got_hold else 0.0)

    async def undo(
        self, claim: Claim, wait_seconds: float = UNDO_WAIT_SECONDS, *, ordered: bool = True
    ) -> None:
        """Removes a claim of unknown outcome from the store, also if the caller is cancelled. Waits
        at most so long for that; it goes on in the background. Not ``ordered``: an attempt was not
        answered, its connection was given up, and it may arrive after this."""
        hold = self.renewer.holds.get(claim.owner)
        if hold is not None:
            self.release_local(hold)
        if self.runtime.blocking:
            self.renewer.undo(claim)  # now, on the renewer's thread: an interrupt can't stop it
            if self.closed:  # unless that thread has ended, or is about to
                await self._abandon(claim)
            return
        # In order behind the claim's own requests. The renewer does it if the loop ends first.
        self.renewer.undo(claim, after=UNDO_BACKUP_SECONDS)
        await self.runtime.finish(self._abandon(claim, ordered=ordered), wait_seconds)

    async def _abandon(self, claim: Claim, *, ordered: bool = True) -> None:
        seconds = self.renewer.finish_seconds() if self.closed else UNDO_BACKUP_SECONDS
        until = self.runtime.now() + seconds  # then the renewer does it
        try:
            await self.backend.abandon(claim, until=until)
        except HoldfastError as error:
            store = self.store.display
            about = {"event": "undoing", "store": store, "name": claim.name}
            log.debug("undoing %r on %s: %s", claim.name, store, error, part="renew", **about)
        else:
            self.renewer.undone(claim, ordered=ordered)

    def forked(self) -> None:
        """In a forked child: drops all holds, waiters and connections without a request."""
        self._labels.clear()
        holds = list(self.renewer.holds.values())
        self.renewer.holds.clear()
        self.renewer.waits.clear()
        self.renewer.undoing.clear()
        self.renewer.dropped.clear()
        self.renewer.interrupted_losses.clear()
        self.local_queues.clear()
        self.reentry.clear()
        self.blocks.clear()
        self.releasing.clear()
        for hold in holds:
            if hold.use is not None:  # else observe.current() would give it
                hold.use.ended = True
            hold.callbacks, hold.on_doubtful, hold.use = [], None, None
            self.renewer.declare_lost(hold, "this process is a fork of the process that holds it")
        self.backend.forget()
        self.renewer.backend.forget()
        for hook in self.on_fork:
            hook()


def _weakly(method: WeakMethod[Callable[[Claim], None]]) -> Callable[[Claim], None]:
    """Calls the method while its object exists: the renewer must not keep the client alive."""

    def call(claim: Claim) -> None:
        alive = method()
        if alive is not None:
            alive(claim)

    return call


def _call_now(callback: Callable[[str], object], reason: str) -> None:
    callback(reason)
