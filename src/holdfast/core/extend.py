"""Extend one hold on request: a renewal that a caller waits for.

The rules that keep it safe are in ``core.hold``. A renewal follows at once after an extend without
an answer, so that the hold is certain again as soon as the store can be reached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.claim import Grant
from holdfast.core.breaking import why_lost
from holdfast.core.hold import Change, Hold, State
from holdfast.errors import BackendUnavailable, HoldfastError, LockLost

if TYPE_CHECKING:
    from holdfast.core.contract import Renewal
    from holdfast.core.engine import Engine

__all__ = ["extend", "lost_error", "renew_now", "wait_for_changes"]

CHANGE_POLL_SECONDS = 0.005
"""How often an extend checks whether the renewal or extend before it is over."""
LEAST_SECONDS = 0.05
"""The request of an extend has at least this long, also if the hold is nearly over."""


async def extend(engine: Engine, hold: Hold, ttl: float | None) -> None:
    """Renews the hold now; raises ``LockLost`` if it is lost, ``BackendUnavailable`` if unknown."""
    change = Change(engine.runtime.me())
    try:
        await wait_for_changes(engine, hold, change)
        await renew_now(engine, hold, ttl)
    finally:
        hold.end_change(change)
        if hold.state is State.HELD:
            engine.renewer.reschedule(hold)


async def wait_for_changes(engine: Engine, hold: Hold, change: Change) -> None:
    """Returns once no other extend or renewal of the hold is under way."""
    if change.caller in [other.caller for other in hold.pending_changes()]:  # would wait for itself
        name = hold.grant.claim.name
        raise HoldfastError(f"{name!r}: a signal handler can't extend it during an extend of it")
    ready = hold.begin_change(change)
    while not ready:
        _check(engine, hold)
        await engine.runtime.sleep(CHANGE_POLL_SECONDS)
        ready = hold.is_first_change(change)


async def renew_now(engine: Engine, hold: Hold, ttl: float | None = None) -> None:
    """Extends a hold whose turn it is: ``wait_for_changes`` has returned."""
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
    # From here the hold is right even if no answer arrives: nothing has to be corrected later.
    shorten = ttl is not None and wanted < hold.stored_ttl
    if wanted < claim.ttl:
        hold.shorten(new, sent)
        engine.renewer.reschedule(hold)
    if shorten:
        hold.ttl_limit = wanted
    hold.stored_ttl = max(hold.stored_ttl, wanted)
    answer = await _request(engine, hold, new, sent, shorten)
    _check(engine, hold)
    hold.grant, hold.ttl_limit = new, limit
    if shorten:
        hold.stored_ttl = wanted
    hold.extended(sent if answer.since is None else min(sent, answer.since))


async def _request(engine: Engine, hold: Hold, grant: Grant, sent: float, shorten: bool) -> Renewal:
    """Sends the renewal; returns only if the store answered that the hold was extended."""
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
        reason = answer.lost[claim.owner]
        try:
            reason = await why_lost(engine.runtime, engine.backend, grant, reason) or reason
        finally:  # also if it is cancelled here
            engine.renewer.lose_and_undo(hold, reason)
        raise lost_error(engine, hold, reason)
    return answer


def _check(engine: Engine, hold: Hold) -> None:
    """Raises ``LockLost`` if the hold is no longer certain: a late answer does not revive it."""
    if hold.state is not State.HELD or engine.runtime.now() >= hold.ends:
        raise lost_error(engine, hold, hold.reason or "its certain time is over")


def lost_error(engine: Engine, hold: Hold, reason: str) -> LockLost:
    """The error of a caller whose hold is lost."""
    name = hold.grant.claim.name
    message = f"{name!r} on {engine.store.display} is no longer held: {reason}"
    return LockLost(message, name=name, reason=reason)
