"""Lease hand-over: one process ends its part in a hold, and another one goes on with it.

``hand_over`` renews the hold a last time, makes it independent of its client, and forgets it there.
``take_over`` gives it to a new owner in one conditional step, with a higher token. In between
nobody renews the hold: it ends with its ttl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.claim import Claim, Grant
from holdfast.core.backoff import OUTAGE_BACKOFF
from holdfast.core.breaking import why_lost
from holdfast.core.contract import HandingOver
from holdfast.core.extend import lost_error, renew_now, wait_for_changes
from holdfast.core.hold import AcquireOptions, Change, Hold, State
from holdfast.durations import shown
from holdfast.errors import (
    BackendUnavailable,
    HoldfastError,
    Incompatible,
    LockLost,
    Unsupported,
)

if TYPE_CHECKING:
    from holdfast.core.engine import Engine

__all__ = ["hand_over", "take_over"]

REQUEST_SECONDS = 0.9
"""The first request of a ``take_over`` has at least this long, however short its timeout is."""
HANDED_OVER = "it was handed over"
GONE = "it is over, was broken, or was taken over already"
UNANSWERED = "whether it was handed over is unknown: the store did not answer"
REFUSALS = (Incompatible, Unsupported, LockLost, ValueError)


def _backend(engine: Engine) -> HandingOver:
    if isinstance(engine.backend, HandingOver):
        return engine.backend
    raise Unsupported(f"{engine.store.display} can't hand a lease over to another process")


def _changed_nothing(error: BaseException) -> bool:
    """Whether a request that ended with this error changed nothing in the store."""
    return isinstance(error, REFUSALS) or (isinstance(error, BackendUnavailable) and error.final)


async def hand_over(engine: Engine, hold: Hold) -> Grant:
    """Ends this client's part in a hold, which lasts for one ttl from now. Returns its grant, with
    what the store needs to find it.

    Raises ``LockLost`` if it is lost, ``Unsupported`` if the store can't do it, and
    ``BackendUnavailable`` if the store did not answer: either nothing has happened and the hold is
    held as before, or whether it was handed over is unknown. Then it is lost here, and undone."""
    backend, change = _backend(engine), Change(engine.runtime.me())
    try:
        await wait_for_changes(engine, hold, change)
        if sum(1 for _ in hold.handles_in_use()) > 1:
            name = hold.grant.claim.name
            raise HoldfastError(f"{name!r} was re-entered: only its last lease can be handed over")
        await renew_now(engine, hold)
        return await _detach(engine, backend, hold)
    finally:
        hold.end_change(change)
        if hold.state is State.HELD:
            engine.renewer.reschedule(hold)


async def _detach(engine: Engine, backend: HandingOver, hold: Hold) -> Grant:
    """Makes the hold, which was just renewed, independent of this client."""
    grant, renewer = hold.grant, engine.renewer
    try:
        ref = await backend.hand_over(grant, until=hold.ends)
        if ref is not None and renewer.remove(hold):
            hold.reason, hold.state = HANDED_OVER, State.RELEASED
            engine.disown(hold)
            if hold.use is not None:
                hold.use.events.released(hold, True)
            return grant._replace(ref=ref)
    except BaseException as error:
        if _changed_nothing(error):
            raise
        renewer.lose(hold, f"{UNANSWERED}; it is undone, and ends with its ttl at the latest")
        renewer.undo(grant.claim)
        engine.disown(hold)
        if isinstance(error, BackendUnavailable):
            raise BackendUnavailable(f"{hold.reason}: {error}") from error
        raise
    reason = "it is no longer stored"
    reason = await why_lost(engine.runtime, engine.backend, grant, reason) or reason
    renewer.lose_and_undo(hold, reason)
    engine.disown(hold)
    raise lost_error(engine, hold, hold.reason or reason)


async def take_over(engine: Engine, grant: Grant, claim: Claim, options: AcquireOptions) -> Hold:
    """Gives a hold that was handed over to this client, for the owner of ``claim``.

    A store that does not answer is asked again within the timeout, or for ``patience`` seconds;
    then it raises ``BackendUnavailable``, and the hold is undone if it was taken over. Raises
    ``LockLost`` if the hold is over or was taken over already."""
    backend = _backend(engine)
    seconds = engine.patience if options.timeout is None else options.timeout
    until, tries = engine.runtime.now() + seconds, 0
    try:
        while True:
            sent = engine.runtime.now()
            try:
                by = max(until, sent + REQUEST_SECONDS)
                answer = await backend.take_over(grant, claim, until=by)
                return await _taken(engine, grant, answer, sent, options)
            except BackendUnavailable as error:
                engine.renewer.unanswered(sent, error)
                tries += not error.final
                delay = OUTAGE_BACKOFF.delay(tries, engine.runtime.between)
                if error.final or engine.runtime.now() + delay >= until:
                    raise
                await engine.runtime.sleep(delay)
    except GeneratorExit:  # the loop is gone: nothing can be awaited here
        engine.renewer.undo(claim)
        raise
    except BaseException as error:
        if tries or not _changed_nothing(error):
            await engine.undo(claim, ordered=False)
        raise


async def _taken(
    engine: Engine, old: Grant, answer: Grant | None, sent: float, options: AcquireOptions
) -> Hold:
    """The hold of an answer that was sent for at ``sent``."""
    engine.renewer.answered(sent)
    name, where = old.claim.name, engine.store.display
    if answer is None:
        reason = await why_lost(engine.runtime, engine.backend, old, GONE) or GONE
        message = f"{name!r} on {where} can't be taken over: {reason}"
        raise LockLost(message, name=name, reason=reason)
    hold = engine.take(answer, sent, options)
    if hold is None:
        took = shown(engine.runtime.now() - sent)
        raise BackendUnavailable(f"{where} took {took}, longer than the ttl of {name!r}")
    return hold
