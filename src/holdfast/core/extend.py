"""Extending one hold on request: the renewal that a caller waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.hold import Hold, State
from holdfast.errors import BackendUnavailable, LockLost

if TYPE_CHECKING:
    from holdfast.core.door import Door

__all__ = ["extend"]


async def extend(door: Door, hold: Hold, ttl: float | None) -> None:
    """Renews the hold now; raises ``LockLost`` if it is gone, ``BackendUnavailable`` if unknown."""
    grant = hold.grant
    claim = grant.claim if ttl is None else grant.claim._replace(ttl=ttl)
    sent = door.runtime.now()
    if hold.state is not State.HELD or sent >= hold.ends:
        raise _gone(door, hold, hold.reason or "its certain time is over")
    new = grant._replace(claim=claim)
    renewals = hold.renewals
    answer = await door.backend.renew([new], [], until=max(hold.ends, sent + 0.05))
    owner = claim.owner
    if owner in answer.lost:
        door.keep.give_up(hold, answer.lost[owner])
        raise _gone(door, hold, answer.lost[owner])
    if owner in answer.unknown:
        raise BackendUnavailable(f"{claim.name!r} could not be renewed: {answer.unknown[owner]}")
    if hold.state is not State.HELD or door.runtime.now() >= hold.ends:
        raise _gone(door, hold, hold.reason or "the answer came after its certain time was over")
    hold.grant = new
    since = sent if answer.since is None else min(sent, answer.since)
    if hold.renewing or hold.renewals != renewals:
        # A renewal with the old ttl is, or was, under way, and may land last at the store.
        hold.extended(since, min(grant.claim.ttl, claim.ttl))
        hold.renew_at = door.runtime.now()
    else:
        hold.extended(since)
    door.keep.plan(hold.next_at())


def _gone(door: Door, hold: Hold, reason: str) -> LockLost:
    name = hold.grant.claim.name
    message = f"{name!r} on {door.store.display} is no longer held: {reason}"
    return LockLost(message, name=name, reason=reason)
