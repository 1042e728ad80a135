"""Acquire: attempt → wait → attempt …, with deadlines and unknown outcomes.

The only implementation: both clients and the simulator run it.
"""

from __future__ import annotations

from holdfast.claim import Busy, Claim, Grant, Holder, LockInfo
from holdfast.core import log
from holdfast.core.backoff import (
    FIRST_WAITER_SECONDS,
    LATER_WAITER_SECONDS,
    LOCAL_RECHECK_SECONDS,
    OUTAGE_BACKOFF,
    RECHECK_SECONDS,
    SPIN_PAUSE_SECONDS,
)
from holdfast.core.engine import Engine
from holdfast.core.hold import AcquireOptions, Hold
from holdfast.core.local_queue import LocalWaiter
from holdfast.errors import (
    BackendUnavailable,
    GuaranteeNotMet,
    HoldfastError,
    Incompatible,
    LockTimeout,
    Unsupported,
)

__all__ = ["acquire", "attempt_once"]

LONG_WAIT_SECONDS = 10.0
"""A longer wait is logged, once."""
LEAST_REQUEST_SECONDS = 0.5
"""A request has at least this long for its answer, also if the caller's timeout is nearly over."""
SPIN_SECONDS = 0.002
"""A wait that ends sooner than this counts as a spin."""
MOST_SPINS = 8
REFUSALS = (LockTimeout, GuaranteeNotMet, Incompatible, Unsupported)
"""An attempt that ends with one of these changed nothing."""


async def attempt_once(engine: Engine, claim: Claim, options: AcquireOptions) -> Hold:
    """Acquires the name now or raises ``LockTimeout``; joins no queue."""
    sent = engine.runtime.now()
    try:
        answer = await engine.backend.attempt(claim, join=False)
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
            await engine.undo(claim)
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
            await _wait_locally(engine, waiter, until, options)
            return await _wait_in_store(engine, waiter, until, options)
        # The usual case, with no step more than needed: no other waiter, and the name is free.
        by = None if until is None else _answer_by(sent, until)
        try:
            answer = await engine.backend.attempt(claim, join=True, until=by)
        except BackendUnavailable as error:  # perhaps a stale connection: _wait_in_store retries
            if error.final:
                raise
            waiter.unanswered = True
            return await _wait_in_store(engine, waiter, until, options)
        hold = engine.take(answer, sent, options) if isinstance(answer, Grant) else None
        return hold or await _wait_in_store(engine, waiter, until, options, answer, sent)
    except GeneratorExit:  # the loop is gone: nothing can be awaited here
        waiter.gone = True
        engine.renewer.undo(claim)
        raise
    except BaseException as error:
        waiter.gone = True
        traces = waiter.in_store_queue or waiter.unanswered or waiter.answer is not None
        if traces or not _is_refusal(error):
            await engine.undo(claim)
        raise
    finally:
        engine.renewer.waits.pop(claim.owner, None)
        try:
            engine.local_queues.leave(waiter)
        except BaseException:  # an interrupt right here must not block the waiters behind
            engine.local_queues.leave(waiter)
            engine.renewer.undo(claim)
            raise


async def _wait_locally(
    engine: Engine, waiter: LocalWaiter, until: float | None, options: AcquireOptions
) -> None:
    """Waits until the waiter is the first of its client; raises ``LockTimeout``."""
    runtime = engine.runtime
    while not waiter.first and waiter.signal is not None:
        recheck = runtime.now() + runtime.between(*LOCAL_RECHECK_SECONDS)
        await runtime.wait(waiter.signal, recheck if until is None else min(until, recheck))
        engine.enter()  # the client may have been closed
        waiter.signal.clear()  # before the check for the first: a signal in between is not lost
        late = until is not None and runtime.now() >= until
        if late and not waiter.first:
            raise await _timed_out(engine, waiter.claim, options, "")


async def _wait_in_store(
    engine: Engine,
    waiter: LocalWaiter,
    until: float | None,
    options: AcquireOptions,
    first_answer: Grant | Busy | None = None,
    sent: float = 0.0,
) -> Hold:
    """Waits in the store's queue and attempts again, until the store grants.

    ``first_answer`` is the answer to an attempt that was sent at ``sent``, if there was one.
    """
    outage: _Outage | None = None
    wait: _StoreWait | None = None
    if isinstance(first_answer, Busy):
        wait = _StoreWait(engine, waiter, until, options)
        await wait.wait(first_answer, sent)
    while True:
        try:
            if waiter.answer is None:
                engine.enter()
                sent = engine.runtime.now()
                by = None if until is None else _answer_by(sent, until)
                answer = await engine.backend.attempt(waiter.claim, join=True, until=by)
            else:  # granted by another thread's exchange, or with the wake-up
                (answer, sent), waiter.answer = waiter.answer, None
            if isinstance(answer, Grant):
                hold = engine.take(answer, sent, options)
                if hold is not None:
                    waiter.got_hold = True
                    return hold
                raise _too_late(engine, waiter.claim, sent)
        except BackendUnavailable as error:
            if error.final:
                raise
            waiter.unanswered = True
            outage = outage or _Outage(engine, waiter.claim, until)
            await outage.wait(error)
            continue
        outage = None
        wait = wait or _StoreWait(engine, waiter, until, options)
        await wait.wait(answer, sent)


def _is_refusal(error: BaseException) -> bool:
    """Whether an attempt that ended with this error changed nothing in the store."""
    return isinstance(error, REFUSALS) or (isinstance(error, BackendUnavailable) and error.final)


def _answer_by(sent: float, until: float) -> float:
    return max(until, sent + LEAST_REQUEST_SECONDS)


class _StoreWait:
    """The wait of a client's first waiter for the store."""

    __slots__ = ("_engine", "_logged", "_options", "_spins", "_started", "_until", "_waiter")

    def __init__(
        self, engine: Engine, waiter: LocalWaiter, until: float | None, options: AcquireOptions
    ) -> None:
        self._engine, self._waiter = engine, waiter
        self._until, self._options = until, options
        self._started = 0.0
        self._logged = False
        self._spins = 0

    async def wait(self, busy: Busy, sent: float) -> None:
        """Waits until another attempt is useful; raises ``LockTimeout`` when the time is over.

        ``busy`` is the answer to the attempt that was sent at ``sent``.
        """
        engine, waiter = self._engine, self._waiter
        now = engine.runtime.now()
        if not waiter.in_store_queue:
            self._started = now
            waiter.in_store_queue = True
            engine.renewer.refresh_waiter(waiter)
        if self._until is not None and now >= self._until:
            await self._give_up(busy)
        if not self._logged and now - self._started > LONG_WAIT_SECONDS:
            self._logged = True
            log.info(await _describe_wait(engine, waiter.claim, now - self._started, busy.reason))
        if waiter.answer is None:
            try:
                grant = await engine.backend.wait(waiter.claim, busy, self._wake_at(busy, now))
                if grant is not None and self._is_usable(grant, sent):
                    waiter.answer = waiter.answer or (grant, sent)
            except BackendUnavailable:
                # The next attempt meets the same outage, and retries with back-off.
                pass
        if waiter.answer is None:
            await self._pause_if_spinning(now)

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

    async def _give_up(self, busy: Busy) -> None:
        waiter = self._waiter
        waiter.gone = True
        await self._engine.backend.abandon(waiter.claim)
        waiter.in_store_queue = False  # nothing is left to undo
        raise await _timed_out(self._engine, waiter.claim, self._options, busy.reason)


class _Outage:
    """The store can't be reached: attempts again with back-off, until the timeout, or for
    ``patience`` seconds if there is none."""

    __slots__ = ("_claim", "_engine", "_since", "_tries", "_until")

    def __init__(self, engine: Engine, claim: Claim, until: float | None) -> None:
        self._engine, self._claim, self._until = engine, claim, until
        self._tries = 0
        self._since = 0.0

    async def wait(self, error: BackendUnavailable) -> None:
        """Returns when it is time to attempt again; raises ``BackendUnavailable`` with the last
        cause when the time is over."""
        runtime = self._engine.runtime
        now = runtime.now()
        if self._tries == 0:
            self._since = now
        self._tries += 1
        limit = self._since + self._engine.patience if self._until is None else self._until
        delay = OUTAGE_BACKOFF.delay(self._tries, runtime.between)
        if now + delay >= limit:
            raise BackendUnavailable(
                f"gave up on {self._claim.name!r} after {self._tries} tries "
                f"in {now - self._since:.1f} s: {error}"
            ) from error
        await runtime.sleep(delay)


def _too_late(engine: Engine, claim: Claim, sent: float) -> BackendUnavailable:
    took = engine.runtime.now() - sent
    return BackendUnavailable(
        f"{engine.store.display} took {took:.2f} s to grant {claim.name!r}: "
        f"nothing certain is left of a ttl of {claim.ttl:g} s"
    )


def _describe(holder: Holder, now: float) -> str:
    """One holder, for people."""
    return f"{holder}, for {max(0.0, now - holder.since):.0f} s"


async def _timed_out(
    engine: Engine, claim: Claim, options: AcquireOptions, reason: str
) -> LockTimeout:
    """The error of an acquire whose timeout is over; names the holder if the store can."""
    if not options.explain:
        return LockTimeout("", name=claim.name)
    info = await _look(engine, claim)
    waited = f"within {options.timeout:g} s" if options.timeout else "at once"
    message = f"{claim.name!r} on {engine.store.display} was not acquired {waited}"
    message += _why(info, reason, engine.runtime.wall())
    holder = info.holders[0] if info and info.holders else None
    return LockTimeout(message, name=claim.name, holder=holder)


async def _describe_wait(engine: Engine, claim: Claim, waited: float, reason: str) -> str:
    """The log line of an acquire that waits for long."""
    why = _why(await _look(engine, claim), reason, engine.runtime.wall())
    return f"waiting for {claim.name!r} on {engine.store.display} for {waited:.0f} s{why}"


async def _look(engine: Engine, claim: Claim) -> LockInfo | None:
    try:
        return await engine.backend.look(claim.name)
    except HoldfastError:
        return None


def _why(info: LockInfo | None, reason: str, now: float) -> str:
    if reason:
        return f": {reason}"
    if info is None or not info.holders:
        return ""
    first, *others = info.holders
    more = f" and {len(others)} more" if others else ""
    notice = f" ({info.notice})" if info.notice else ""
    return f": held by {_describe(first, now)}{more}{notice}"
