"""Acquire: attempt → wait → attempt …, with deadlines and unknown outcomes. The one copy."""

from __future__ import annotations

from holdfast.claim import Busy, Claim, Grant
from holdfast.core import log
from holdfast.core.engine import Engine
from holdfast.core.hold import Ask, Hold
from holdfast.core.local_queue import Turn
from holdfast.core.refusal import timed_out, told_so_far
from holdfast.errors import (
    BackendUnavailable,
    GuaranteeNotMet,
    Incompatible,
    LockTimeout,
    Unsupported,
)

__all__ = ["acquire", "attempt_once"]

LONG_WAIT_SECONDS = 10.0
RECHECK_SECONDS = (5.0, 8.0)
"""A lost wake-up costs at most so much."""
LOCAL_RECHECK_SECONDS = (20.0, 40.0)
LEAST_REQUEST_SECONDS = 0.5
REFUSALS = (LockTimeout, GuaranteeNotMet, Incompatible, Unsupported)
"""An attempt that ends with one of these changed nothing."""


async def attempt_once(engine: Engine, claim: Claim, ask: Ask) -> Hold:
    """Takes the name now or raises ``LockTimeout``; leaves no trace in the line."""
    sent = engine.runtime.now()
    try:
        answer = await engine.backend.attempt(claim, join=False)
        if isinstance(answer, Grant):
            hold = engine.take(answer, sent, ask)
            if hold is not None:
                return hold
            raise _too_late(engine, claim, sent)
    except GeneratorExit:
        engine.renewer.undo(claim)
        raise
    except REFUSALS:
        raise
    except BaseException:
        await engine.undo(claim)
        raise
    raise await timed_out(engine, claim, ask, answer.reason)


async def acquire(engine: Engine, claim: Claim, ask: Ask) -> Hold:
    """Waits for its turn in the client, then in the store's line, until the timeout."""
    turn = Turn(claim)
    sent = engine.runtime.now()
    until = None if ask.timeout is None else sent + ask.timeout
    try:
        if not engine.lines.join(turn):
            await _wait_for_turn(engine, turn, until, ask)
            return await _stand(engine, turn, until, ask)
        # The usual way, without a step more than it needs: nobody waits and it is free.
        by = None if until is None else _answer_by(sent, until)
        try:
            answer = await engine.backend.attempt(claim, join=True, until=by)
        except BackendUnavailable:  # perhaps a connection that went stale: _stand has patience
            turn.unsure = True
            return await _stand(engine, turn, until, ask)
        hold = engine.take(answer, sent, ask) if isinstance(answer, Grant) else None
        return hold or await _stand(engine, turn, until, ask, answer, sent)
    except GeneratorExit:  # the loop is gone, and nothing can be awaited any more
        turn.gone = True
        engine.renewer.undo(claim)
        raise
    except BaseException as error:
        turn.gone = True
        traces = turn.standing or turn.unsure or turn.answer is not None
        if traces or not isinstance(error, REFUSALS):
            await engine.undo(claim)
        raise
    finally:
        engine.renewer.waits.pop(claim.owner, None)
        try:
            engine.lines.leave(turn)
        except BaseException:  # an interrupt right here must not strand those behind
            engine.lines.leave(turn)
            engine.renewer.undo(claim)
            raise


async def _wait_for_turn(engine: Engine, turn: Turn, until: float | None, ask: Ask) -> None:
    runtime = engine.runtime
    while not turn.first and turn.signal is not None:
        recheck = runtime.now() + runtime.between(*LOCAL_RECHECK_SECONDS)
        await runtime.wait(turn.signal, recheck if until is None else min(until, recheck))
        engine.enter()  # it may have been closed
        turn.signal.clear()  # before the look at who is first: a call in between is not lost
        late = until is not None and runtime.now() >= until
        if late and not turn.first:
            raise await timed_out(engine, turn.claim, ask, "")


async def _stand(
    engine: Engine,
    turn: Turn,
    until: float | None,
    ask: Ask,
    told: Grant | Busy | None = None,
    sent: float = 0.0,
) -> Hold:
    """Waits where the store says so, and asks it again, until it grants."""
    outage: _Outage | None = None
    wait: _Wait | None = None
    if isinstance(told, Busy):
        wait = _Wait(engine, turn, until, ask)
        await wait.wait(told, sent)
    while True:
        try:
            if turn.answer is None:
                engine.enter()
                sent = engine.runtime.now()
                by = None if until is None else _answer_by(sent, until)
                answer = await engine.backend.attempt(turn.claim, join=True, until=by)
            else:  # it was asked by an exchange on our behalf, or before it woke us with a grant
                (answer, sent), turn.answer = turn.answer, None
            if isinstance(answer, Grant):
                hold = engine.take(answer, sent, ask)
                if hold is not None:
                    turn.served = True
                    return hold
                raise _too_late(engine, turn.claim, sent)
        except BackendUnavailable as error:
            turn.unsure = True
            outage = outage or _Outage(engine, turn.claim, until)
            await outage.hold_out(error)
            continue
        outage = None
        wait = wait or _Wait(engine, turn, until, ask)
        await wait.wait(answer, sent)


def _answer_by(sent: float, until: float) -> float:
    # A store that is merely slow still gets a moment, also when the caller's time is nearly over.
    return max(until, sent + LEAST_REQUEST_SECONDS)


class _Wait:
    """The wait of one who stands first in this client."""

    __slots__ = ("_ask", "_early", "_engine", "_started", "_told", "_turn", "_until")

    def __init__(self, engine: Engine, turn: Turn, until: float | None, ask: Ask) -> None:
        self._engine, self._turn, self._until, self._ask = engine, turn, until, ask
        self._started = 0.0
        self._told = False
        self._early = 0

    async def wait(self, busy: Busy, asked: float) -> None:
        """Until another attempt is worth it; raises ``LockTimeout`` when the time is over."""
        engine, turn = self._engine, self._turn
        now = engine.runtime.now()
        if not turn.standing:
            self._started = now
            turn.standing = True
            engine.renewer.stand(turn)
        if self._until is not None and now >= self._until:
            await self._give_up(busy)
        if not self._told and now - self._started > LONG_WAIT_SECONDS:
            self._told = True
            log.info(await told_so_far(engine, turn.claim, now - self._started, busy.reason))
        if turn.answer is None:
            try:
                grant = await engine.backend.wait(turn.claim, busy, self._wake_at(busy, now))
                if grant is not None and self._relies_on(grant, asked):
                    turn.answer = turn.answer or (grant, asked)
            except BackendUnavailable:
                # If it can't wait for word, it asks: that meets the outage too, and has patience.
                pass
        if turn.answer is None:
            await self._pause_if_spinning(now)

    def _relies_on(self, grant: Grant, asked: float) -> bool:
        """Whether to hold what the store granted as it woke us: it did so after it was ``asked``,
        and for a moment. Where much of that may be over, or nobody would renew it, another attempt
        gets the same grant for the whole ttl."""
        if grant.seconds is None:
            return True
        return self._ask.renew and self._engine.runtime.now() < asked + grant.seconds / 2

    def _wake_at(self, busy: Busy, now: float) -> float:
        """The bounded, jittered re-check behind every notification."""
        runtime = self._engine.runtime
        retry = busy.retry_seconds
        if retry is None or retry > RECHECK_SECONDS[1]:
            seconds = runtime.between(*RECHECK_SECONDS)
        else:
            # The first in line comes right at the end of what is in front, the others later.
            jitter = (0.005, 0.03) if busy.place == 0 else (0.05, 0.8)
            seconds = retry + runtime.between(*jitter)
        return now + seconds if self._until is None else min(self._until, now + seconds)

    async def _pause_if_spinning(self, asked: float) -> None:
        # A source of wake-ups that is broken may end every wait at once.
        runtime = self._engine.runtime
        self._early = self._early + 1 if runtime.now() - asked < 0.002 else 0
        if self._early > 8:
            await runtime.sleep(runtime.between(0.01, 0.05))

    async def _give_up(self, busy: Busy) -> None:
        turn = self._turn
        turn.gone = True
        await self._engine.backend.abandon(turn.claim)
        turn.standing = False  # nothing is left to undo
        raise await timed_out(self._engine, turn.claim, self._ask, busy.reason)


class _Outage:
    """The store can't be reached: tried again with jittered back-off, within limits."""

    __slots__ = ("_claim", "_engine", "_since", "_tries", "_until")

    def __init__(self, engine: Engine, claim: Claim, until: float | None) -> None:
        self._engine, self._claim, self._until = engine, claim, until
        self._tries = 0
        self._since = 0.0

    async def hold_out(self, error: BackendUnavailable) -> None:
        """Returns when it is time to try again, or raises what the last try raised."""
        runtime = self._engine.runtime
        now = runtime.now()
        if self._tries == 0:
            self._since = now
        self._tries += 1
        limit = self._since + self._engine.patience if self._until is None else self._until
        delay = min(2.0, 0.05 * 2 ** min(self._tries, 10)) * runtime.between(0.5, 1.0)
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
