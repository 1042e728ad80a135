"""Extending one hold on request: the renewal that a caller waits for.

The rules that keep it safe are in ``core.hold``. An extend that is not answered is followed by a
renewal at once, so that the hold is certain again as soon as the store can be reached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.claim import Grant
from holdfast.core.hold import Change, Hold, State
from holdfast.errors import BackendUnavailable, HoldfastError, LockLost

if TYPE_CHECKING:
    from holdfast.core.contract import Renewal
    from holdfast.core.engine import Engine

__all__ = ["extend"]

TURN_SECONDS = 0.005
"""How often an extend looks whether the renewal or extend before it is over."""
LEAST_SECONDS = 0.05
"""An extend of a hold that is nearly over still has so long for its request."""


async def extend(engine: Engine, hold: Hold, ttl: float | None) -> None:
    """Renews the hold now; raises ``LockLost`` if it is gone, ``BackendUnavailable`` if unknown."""
    change = Change(engine.runtime.me())
    try:
        await _wait_for_turn(engine, hold, change)
        await _extend(engine, hold, ttl)
    finally:
        hold.end(change)
        if hold.state is State.HELD:
            engine.renewer.reschedule(hold)


async def _wait_for_turn(engine: Engine, hold: Hold, change: Change) -> None:
    """Returns once no other extend or renewal of the hold is under way."""
    if change.who in [other.who for other in hold.under_way()]:  # it would wait for itself
        name = hold.grant.claim.name
        raise HoldfastError(f"{name!r}: a signal handler can't extend it during an extend of it")
    turn = hold.begin(change)
    while not turn:
        _check(engine, hold)
        await engine.runtime.sleep(TURN_SECONDS)
        turn = hold.is_turn_of(change)


async def _extend(engine: Engine, hold: Hold, ttl: float | None) -> None:
    sent = engine.runtime.now()
    _check(engine, hold)
    claim = hold.grant.claim
    new = hold.grant if ttl is None else hold.grant._replace(claim=claim._replace(ttl=ttl))
    wanted, limit = new.claim.ttl, hold.ttl_limit
    if wanted > limit:
        raise BackendUnavailable(
            f"{claim.name!r} on {engine.store.display} can't be extended to {wanted:g} s: an "
            f"extend to {limit:g} s was not answered and may still arrive; release it and take "
            "it again"
        )
    # What is noted here holds if no answer comes: whatever happens, nothing need be added.
    shorten = ttl is not None and wanted < hold.stored_ttl
    if wanted < claim.ttl:
        hold.shorten(new, sent)
        engine.renewer.reschedule(hold)
    if shorten:
        hold.ttl_limit = wanted
    hold.stored_ttl = max(hold.stored_ttl, wanted)
    answer = await _ask(engine, hold, new, sent, shorten)
    _check(engine, hold)
    hold.grant, hold.ttl_limit = new, limit
    if shorten:
        hold.stored_ttl = wanted
    hold.extended(sent if answer.since is None else min(sent, answer.since))


async def _ask(engine: Engine, hold: Hold, grant: Grant, sent: float, shorten: bool) -> Renewal:
    """Asks the store; returns only if it said that the hold was extended."""
    claim = grant.claim
    until = hold.doubtful_at if sent < hold.doubtful_at else hold.ends
    until = max(until, sent + LEAST_SECONDS)
    try:
        answer = await engine.backend.renew([grant], [], until=until, shorten=shorten)
        cause = answer.unknown.get(claim.owner)
        if cause is not None:
            raise BackendUnavailable(f"{claim.name!r} could not be renewed: {cause}")
    except BaseException:
        hold.renew_by(engine.runtime.now())
        raise
    if claim.owner in answer.lost:
        engine.renewer.give_up(hold, answer.lost[claim.owner])
        raise _gone(engine, hold, answer.lost[claim.owner])
    return answer


def _check(engine: Engine, hold: Hold) -> None:
    """Raises ``LockLost`` if the hold is no longer certain: a late answer revives nothing."""
    if hold.state is not State.HELD or engine.runtime.now() >= hold.ends:
        raise _gone(engine, hold, hold.reason or "its certain time is over")


def _gone(engine: Engine, hold: Hold, reason: str) -> LockLost:
    name = hold.grant.claim.name
    message = f"{name!r} on {engine.store.display} is no longer held: {reason}"
    return LockLost(message, name=name, reason=reason)
