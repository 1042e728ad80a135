"""Acquire: attempt → wait → attempt …, with deadlines and unknown outcomes.

The only implementation: both clients and the simulator run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.claim import Busy, Claim, Grant, LockInfo
from holdfast.core import log
from holdfast.core.backoff import (
    FIRST_WAITER_SECONDS,
    LAST_ATTEMPT_SECONDS,
    LATER_WAITER_SECONDS,
    LOCAL_RECHECK_SECONDS,
    OUTAGE_BACKOFF,
    RECHECK_SECONDS,
    SPIN_PAUSE_SECONDS,
)
from holdfast.core.contract import HolderLooking
from holdfast.core.engine import UNDO_WAIT_SECONDS, Engine
from holdfast.core.hold import NEVER, AcquireOptions, Hold
from holdfast.core.local_queue import LocalWaiter
from holdfast.durations import counted, shown
from holdfast.errors import (
    BackendUnavailable,
    GuaranteeNotMet,
    HoldfastError,
    Incompatible,
    LockTimeout,
    Unsupported,
)

if TYPE_CHECKING:
    from holdfast.core.deadlock import DeadlockSearch
    from holdfast.core.events import LockUse

__all__ = ["acquire", "attempt_once"]

LONG_WAIT_SECONDS = 10.0
"""A longer wait is logged, once, and a deadlock that it is in."""
LOOK_SECONDS = 0.4
"""How long a timeout, or the begin of a wait, may be delayed to name the holder."""
FIRST_REQUEST_SECONDS = 0.9
LEAST_REQUEST_SECONDS = 0.5
"""The first request of an acquire has at least the first value for its answer, however short the
caller's timeout is; a later one the second, also if the timeout is nearly over. A second is
promised with ``close``, which has the rest of it."""
SPIN_SECONDS = 0.002
"""A wait that ends sooner than this counts as a spin."""
MOST_SPINS = 8
REFUSALS = (LockTimeout, GuaranteeNotMet, Incompatible, Unsupported)
"""An attempt that ends with one of these changed nothing."""


async def attempt_once(engine: Engine, claim: Claim, options: AcquireOptions) -> Hold:
    """Acquires the name now or raises ``LockTimeout``; joins no queue."""
    sent = engine.runtime.now()
    # A store that was slow before gets longer; one that hangs must not delay the caller for long.
    by = sent + max(FIRST_REQUEST_SECONDS, engine.renewer.finish_seconds())
    try:
        answer = await engine.backend.attempt(claim, join=False, until=by)
        engine.renewer.answered(sent, options.use)
        if isinstance(answer, Grant):
            hold = engine.take(answer, sent, options)
            if hold is not None:
                return hold
            raise _too_late(engine, claim, sent)
    except GeneratorExit:
        engine.renewer.undo(claim)
        raise
    except BaseException as error:
        if not _is_refusal(error):
            late = engine.runtime.now() >= by
            ordered = not isinstance(error, BackendUnavailable)
            try:
                if isinstance(error, BackendUnavailable):
                    engine.renewer.unanswered(sent, error)
            finally:  # also after an interrupt in an observer
                await engine.undo(claim, 0.0 if late else UNDO_WAIT_SECONDS, ordered=ordered)
        raise
    raise await _timed_out(engine, claim, options, answer.reason)


async def acquire(engine: Engine, claim: Claim, options: AcquireOptions) -> Hold:
    """Waits in the local queue of the client, then in the store's queue, until the timeout.

    Raises ``LockTimeout`` when the timeout is over, ``BackendUnavailable`` when the store can't be
    reached for too long. An acquire that ends with an exception leaves no hold and no entry.
    """
    waiter = LocalWaiter(claim)
    sent = engine.runtime.now()
    until = None if options.timeout is None else sent + options.timeout
    try:
        if not engine.local_queues.join(waiter):
            engine.renewer.recount()
            outage = _Outage(engine, claim, until, sent)
            await _wait_locally(engine, waiter, options, outage)
            return await _wait_in_store(engine, waiter, options, outage)
        # The usual case, with no step more than needed: no other waiter, and the name is free.
        by = sent + max(FIRST_REQUEST_SECONDS, engine.patience if until is None else until - sent)
        try:
            answer = await engine.backend.attempt(claim, join=True, until=by)
        except BackendUnavailable as error:  # perhaps a stale connection: _wait_in_store retries
            waiter.unanswered = not error.final
            outage = _Outage(engine, claim, until, sent)
            outage.failed(error, sent)
            return await _wait_in_store(engine, waiter, options, outage)
        engine.renewer.answered(sent, options.use)
        hold = engine.take(answer, sent, options) if isinstance(answer, Grant) else None
        if hold is not None:
            return hold
        outage = _Outage(engine, claim, until, sent)
        return await _wait_in_store(engine, waiter, options, outage, answer, sent)
    except GeneratorExit:  # the loop is gone: nothing can be awaited here
        waiter.gone = True
        engine.renewer.undo(claim)
        raise
    except BaseException as error:
        waiter.gone = True
        traces = waiter.in_store_queue or waiter.unanswered or waiter.answer is not None
        if traces or not _is_refusal(error):
            await _undo(engine, waiter, until, error)
        raise
    finally:
        try:
            engine.renewer.waits.pop(claim.owner, None)
            engine.local_queues.leave(waiter)
            if waiter.signal is not None:  # it was behind another waiter
                engine.renewer.recount()
        except BaseException:  # an interrupt right here must not block the waiters behind
            engine.local_queues.leave(waiter)
            engine.renewer.undo(claim)
            raise


async def _undo(
    engine: Engine, waiter: LocalWaiter, until: float | None, error: BaseException
) -> None:
    late = until is not None and engine.runtime.now() >= until
    ordered = not waiter.unanswered and not isinstance(error, BackendUnavailable)
    await engine.undo(waiter.claim, 0.0 if late else UNDO_WAIT_SECONDS, ordered=ordered)


async def _wait_locally(
    engine: Engine, waiter: LocalWaiter, options: AcquireOptions, outage: _Outage
) -> None:
    """Waits until the waiter is the first of its client; raises ``LockTimeout``, or
    ``BackendUnavailable`` if the waiter in front of it gets no answers."""
    runtime = engine.runtime
    if options.use is not None:
        await _tell_waiting(engine, waiter.claim, options.use, None)
    if trace := log.tracer("lock"):
        text = "busy: %r on %s, behind other waiters of this client"
        about = {"event": "busy", "store": engine.store.display, "name": waiter.claim.name}
        trace(text, about["name"], about["store"], **about)
    while not waiter.first and waiter.signal is not None:
        recheck = runtime.now() + runtime.between(*LOCAL_RECHECK_SECONDS)
        await runtime.wait(waiter.signal, min(recheck, outage.local_limit()))
        engine.enter()  # the client may have been closed
        waiter.signal.clear()  # before the check for the first: a signal in between is not lost
        if runtime.now() >= outage.local_limit() and not waiter.first:
            outage.check_local()
            if outage.until is None:  # the outage has ended at this moment
                continue
            raise await _timed_out(engine, waiter.claim, options, "", waiter)


async def _wait_in_store(
    engine: Engine,
    waiter: LocalWaiter,
    options: AcquireOptions,
    outage: _Outage,
    first_answer: Grant | Busy | None = None,
    sent: float = 0.0,
) -> Hold:
    """Waits in the store's queue and attempts again, until the store grants.

    ``first_answer`` is the answer to an attempt that was sent at ``sent``, if there was one.
    """
    claim, wait = waiter.claim, _StoreWait(engine, waiter, outage.until, options)
    if isinstance(first_answer, Busy):
        outage.end()
        await wait.wait(first_answer, sent)
    while True:
        try:
            if waiter.answer is None:
                engine.enter()
                sent = engine.runtime.now()
                by = outage.answer_by(sent)
                answer = await engine.backend.attempt(claim, join=True, until=by)
                engine.renewer.answered(sent, options.use)
            else:  # granted by another thread's exchange, or with the wake-up
                (answer, sent), waiter.answer = waiter.answer, None
            outage.end()
            if isinstance(answer, Grant):
                hold = engine.take(answer, sent, options)
                if hold is not None:
                    waiter.got_hold = True
                    return hold
                raise _too_late(engine, claim, sent)
        except BackendUnavailable as error:
            waiter.unanswered = waiter.unanswered or not error.final
            await outage.wait(error, sent)
            continue
        await wait.wait(answer, sent)


def _is_refusal(error: BaseException) -> bool:
    """Whether an attempt that ended with this error changed nothing in the store."""
    return isinstance(error, REFUSALS) or (isinstance(error, BackendUnavailable) and error.final)


class _StoreWait:
    """The wait of a client's first waiter for the store."""

    __slots__ = (
        "_deadlocks",
        "_engine",
        "_logged",
        "_options",
        "_spins",
        "_started",
        "_until",
        "_waiter",
    )

    def __init__(
        self, engine: Engine, waiter: LocalWaiter, until: float | None, options: AcquireOptions
    ) -> None:
        self._engine, self._waiter = engine, waiter
        self._until, self._options = until, options
        self._started = 0.0
        self._logged = False
        self._deadlocks: DeadlockSearch | None = None
        """From the first time on that the wait is found to be long."""
        self._spins = 0

    async def wait(self, busy: Busy, sent: float) -> None:
        """Waits until another attempt is useful; raises ``LockTimeout`` when the time is over.

        ``busy`` is the answer to the attempt that was sent at ``sent``.
        """
        engine, waiter = self._engine, self._waiter
        now = engine.runtime.now()
        if self._options.use is not None:
            self._options.use.tell_attempt()
        if not waiter.in_store_queue:
            now = await self._join(busy, now)
        if self._until is not None and now >= self._until:
            await self._give_up(busy, now)
        if now - self._started > LONG_WAIT_SECONDS:
            await self._tell_long(busy, now)
        wake_at = self._wake_at(busy, now)
        self._trace_busy(busy.place, wake_at - now)
        if waiter.answer is None:
            try:
                grant = await engine.backend.wait(waiter.claim, busy, wake_at)
                if grant is not None and self._is_usable(grant, sent):
                    waiter.answer = waiter.answer or (grant, sent)
            except BackendUnavailable:
                # The next attempt meets the same outage, and retries with back-off.
                pass
        if trace := log.tracer("lock"):
            waited, how = engine.runtime.now() - now, "attempts" if waiter.answer is None else "has"
            name, store = waiter.claim.name, engine.store.display
            about = {"event": "woken", "store": store, "name": name}
            trace("woken: %s %r after %.3g s", how, name, waited, waited=waited, **about)
        if waiter.answer is None:
            await self._pause_if_spinning(now)

    def _trace_busy(self, place: int, seconds: float) -> None:
        if trace := log.tracer("lock"):
            name, store = self._waiter.claim.name, self._engine.store.display
            about = {"event": "busy", "store": store, "name": name, "place": place}
            text = "busy: %r on %s, %d in front; attempts again after a wake-up, or in %.3g s"
            trace(text, name, store, place, seconds, **about)

    async def _join(self, busy: Busy, now: float) -> float:
        """The claim has an entry in the store's queue now; returns the time."""
        engine, waiter, use = self._engine, self._waiter, self._options.use
        self._started = now
        waiter.in_store_queue = True
        engine.renewer.refresh_waiter(waiter)
        if use is None:
            return now
        await _tell_waiting(engine, waiter.claim, use, busy.place)
        return engine.runtime.now()

    async def _tell_long(self, busy: Busy, now: float) -> None:
        """Logs that the wait is long, and looks for a deadlock beside it; each of them once."""
        if not self._logged:
            self._logged = True
            await _log_wait(self._engine, self._waiter.claim, now - self._started, busy.reason)
        for_error = self._until is not None and self._options.explain
        await self._search().begin(for_error=for_error)

    def _search(self) -> DeadlockSearch:
        from holdfast.core.deadlock import DeadlockSearch

        if self._deadlocks is None:
            self._deadlocks = DeadlockSearch(self._engine, self._waiter)
        return self._deadlocks

    def _is_usable(self, grant: Grant, sent: float) -> bool:
        """Whether to use a direct grant, which the store made after ``sent`` and for
        ``grant.seconds`` only. If half of that time may be over, or if the hold is not renewed,
        another attempt is better: it gets the same grant for the whole ttl."""
        if grant.seconds is None:
            return True
        return self._options.renew and self._engine.runtime.now() < sent + grant.seconds / 2

    def _wake_at(self, busy: Busy, now: float) -> float:
        """The bounded, jittered re-check behind every notification."""
        runtime = self._engine.runtime
        retry = busy.retry_seconds
        if retry is None or retry > RECHECK_SECONDS[1]:
            seconds = runtime.between(*RECHECK_SECONDS)
        else:
            # The first waiter attempts right at the end of what is in front, the others later.
            jitter = FIRST_WAITER_SECONDS if busy.place == 0 else LATER_WAITER_SECONDS
            seconds = retry + runtime.between(*jitter)
        return now + seconds if self._until is None else min(self._until, now + seconds)

    async def _pause_if_spinning(self, began: float) -> None:
        # A broken source of wake-ups may end every wait at once.
        runtime = self._engine.runtime
        self._spins = self._spins + 1 if runtime.now() - began < SPIN_SECONDS else 0
        if self._spins > MOST_SPINS:
            await runtime.sleep(runtime.between(*SPIN_PAUSE_SECONDS))

    async def _give_up(self, busy: Busy, now: float) -> None:
        waiter = self._waiter
        waiter.gone = True
        engine, by = self._engine, self._engine.runtime.now() + LEAST_REQUEST_SECONDS
        answers = True
        try:
            await engine.backend.abandon(waiter.claim, until=by)
            waiter.in_store_queue = False  # nothing is left to undo
        except BackendUnavailable:  # the renewer undoes it
            answers = False
        search = self._search() if now - self._started > LONG_WAIT_SECONDS else None
        raise await _timed_out(
            engine, waiter.claim, self._options, busy.reason, answers=answers, search=search
        )


class _Outage:
    """The store can't be reached: attempts again with back-off, until the timeout, or for
    ``patience`` seconds if there is none.

    Patience counts from the first attempt that was not answered, also if another waiter of this
    client sent it while this one was behind it."""

    __slots__ = ("_claim", "_engine", "_since", "_started", "_tries", "until")

    def __init__(self, engine: Engine, claim: Claim, until: float | None, started: float) -> None:
        self._engine, self._claim, self.until, self._started = engine, claim, until, started
        self._tries = 0
        self._since: float | None = None

    def answer_by(self, sent: float) -> float:
        """The deadline of an attempt that is sent now."""
        limit = self.until
        if limit is None:
            limit = (sent if self._since is None else self._since) + self._engine.patience
        return max(limit, sent + LEAST_REQUEST_SECONDS)

    def local_limit(self) -> float:
        """When a waiter behind others of its client gives up."""
        if self.until is not None:
            return self.until
        outage = self._engine.local_queues.outages.get(self._claim.name)
        return NEVER if outage is None else self._seen(outage.since) + self._engine.patience

    def check_local(self) -> None:
        """Raises ``BackendUnavailable`` if the first waiter of the client gets no answers."""
        outage = self._engine.local_queues.outages.get(self._claim.name)
        if outage is not None:
            self._since = self._seen(outage.since)
            raise self._gave_up(outage.error)

    def _seen(self, since: float) -> float:
        return max(since, self._started)

    def failed(self, error: BackendUnavailable, sent: float) -> None:
        """Counts an attempt that was not answered and is made again at once; raises
        ``BackendUnavailable`` with this cause when the time is over, or if it is final."""
        self._count(error, sent)
        self._trace(0.0, error)

    def _count(self, error: BackendUnavailable, sent: float) -> None:
        if error.final:
            raise error
        self._tries += 1
        self._engine.renewer.unanswered(sent, error)
        known = self._engine.local_queues.unreachable(self._claim.name, sent, error)
        self._since = self._seen(known.since)
        self._check_time(0.0, error)

    async def wait(self, error: BackendUnavailable, sent: float) -> None:
        """As ``failed``; returns when it is time to attempt again."""
        self._count(error, sent)
        runtime = self._engine.runtime
        delay = self._pause()
        self._check_time(delay, error)
        self._trace(delay, error)
        await runtime.sleep(delay)

    def _trace(self, delay: float, error: BackendUnavailable) -> None:
        """Logs the attempt that failed, and how long it is until the next one."""
        if trace := log.tracer("store"):
            text = "unreachable: attempt %d for %r; the next one in %.3g s: %s"
            about = {"event": "unreachable", "store": self._engine.store.display}
            values = self._tries, self._claim.name, delay, error
            trace(text, *values, name=self._claim.name, **about)

    def _pause(self) -> float:
        """Seconds until the next attempt. The last pause is cut, so that there is an attempt
        shortly before the time is over."""
        runtime = self._engine.runtime
        delay = OUTAGE_BACKOFF.delay(self._tries, runtime.between)
        left = self._limit() - runtime.now()
        last = left - runtime.between(*LAST_ATTEMPT_SECONDS)
        return last if 0.0 < last < delay else delay

    def _limit(self) -> float:
        since = self._since or 0.0
        return since + self._engine.patience if self.until is None else self.until

    def _check_time(self, delay: float, error: BackendUnavailable) -> None:
        if self._engine.runtime.now() + delay >= self._limit():
            raise self._gave_up(error) from error

    def _gave_up(self, error: BackendUnavailable) -> BackendUnavailable:
        took = shown(self._engine.runtime.now() - (self._since or 0.0))
        tries = f"after {counted(self._tries, 'try', 'tries')} in" if self._tries else "after"
        return BackendUnavailable(f"gave up on {self._claim.name!r} {tries} {took}: {error}")

    def end(self) -> None:
        """An attempt was answered."""
        if self._tries or self._engine.local_queues.outages:
            self._tries, self._since = 0, None
            self._engine.local_queues.reachable(self._claim.name)


def _too_late(engine: Engine, claim: Claim, sent: float) -> BackendUnavailable:
    took = engine.runtime.now() - sent
    return BackendUnavailable(
        f"{engine.store.display} took {shown(took)} to grant {claim.name!r}: "
        f"nothing certain is left of a ttl of {shown(claim.ttl)}"
    )


async def _timed_out(
    engine: Engine,
    claim: Claim,
    options: AcquireOptions,
    reason: str,
    behind: LocalWaiter | None = None,
    *,
    answers: bool = True,
    search: DeadlockSearch | None = None,
) -> LockTimeout:
    """The error of an acquire whose timeout is over; names the holder if the store ``answers``, and
    a deadlock if the ``search`` finds one. If the acquire was ``behind`` other waiters of its
    client, the store may have stopped to answer."""
    if not options.explain:
        return LockTimeout("", name=claim.name)
    ahead = 0 if behind is None else engine.local_queues.ahead_of(behind)
    info: LockInfo | None = None
    if behind is not None:
        info = await engine.runtime.within(_look(engine, claim), LOOK_SECONDS)
    elif answers:
        info = await _look(engine, claim)
    waited = f"within {shown(options.timeout)}" if options.timeout else "at once"
    message = f"{claim.name!r} on {engine.store.display} was not acquired {waited}"
    why = _why(info, reason, engine.runtime.wall())
    if not why and ahead:
        why = f": {counted(ahead, 'waiter')} of this process {'was' if ahead == 1 else 'were'} "
        why += "ahead of it"
    holder = info.holders[0] if info and info.holders else None
    if search is None or holder is None:
        return LockTimeout(message + why, name=claim.name, holder=holder)
    deadlock, names = await search.at_timeout()
    return LockTimeout(message + why + deadlock, name=claim.name, holder=holder, deadlock=names)


async def _tell_waiting(engine: Engine, claim: Claim, use: LockUse, place: int | None) -> None:
    """Tells observers that the acquire has to wait: once, with the holder if one of them wants it.
    A waiter behind others of its client (``place`` is ``None``) sends no request for that."""
    from holdfast.core.events import own_holder

    holder = None
    if use.events.wants_holder(use):
        holder = own_holder(engine, use)
        if holder is None and place is not None:
            info = await engine.runtime.within(_look(engine, claim), LOOK_SECONDS)
            holder = info.holders[0] if info and info.holders else None
    use.events.waiting(use, place, holder)


async def _log_wait(engine: Engine, claim: Claim, waited: float, reason: str) -> None:
    """Logs that an acquire has waited for long, and for whom."""
    if not log.wants_info(
        "lock"
    ):  # there may be many waiters, and finding out costs a request each
        return
    why = _why(await _look(engine, claim), reason, engine.runtime.wall())
    where, seconds = engine.store.display, shown(round(waited))
    about = {"event": "waiting", "store": where, "name": claim.name, "waited": waited}
    text = "waiting for %r on %s for %s%s"
    log.info(text, claim.name, where, seconds, why, part="lock", **about)


async def _look(engine: Engine, claim: Claim) -> LockInfo | None:
    backend = engine.backend
    try:
        if isinstance(backend, HolderLooking):
            return await backend.look_at_holders(claim)
        return await backend.look(claim.name)
    except HoldfastError:
        return None


def _why(info: LockInfo | None, reason: str, now: float) -> str:
    if reason:
        return f": {reason}"
    if info is None or not info.holders:
        return ""
    return f": {'; '.join(info.explain(now))}"
