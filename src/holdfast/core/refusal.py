"""What is told to somebody who did not get a lock: by whom it is held, since when, why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.claim import Claim, Holder
from holdfast.core.hold import Ask
from holdfast.errors import HoldfastError, LockTimeout

if TYPE_CHECKING:
    from holdfast.core.door import Door

__all__ = ["describe", "timed_out", "told_so_far"]


def describe(holder: Holder, now: float) -> str:
    """One holder, for people."""
    return f"{holder}, for {max(0.0, now - holder.since):.0f} s"


async def timed_out(door: Door, claim: Claim, ask: Ask, reason: str) -> LockTimeout:
    """The error for somebody whose time is over; names the holder where the store can tell."""
    if not ask.explain:
        return LockTimeout("", name=claim.name)
    holders = await _holders(door, claim)
    waited = f"within {ask.timeout:g} s" if ask.timeout else "at once"
    message = f"{claim.name!r} on {door.store.display} was not acquired {waited}"
    message += _why(holders, reason, door.runtime.wall())
    return LockTimeout(message, name=claim.name, holder=holders[0] if holders else None)


async def told_so_far(door: Door, claim: Claim, waited: float, reason: str) -> str:
    """The line for the log of somebody who waits for long."""
    why = _why(await _holders(door, claim), reason, door.runtime.wall())
    return f"waiting for {claim.name!r} on {door.store.display} for {waited:.0f} s{why}"


async def _holders(door: Door, claim: Claim) -> tuple[Holder, ...]:
    try:
        return (await door.backend.look(claim.name)).holders
    except HoldfastError:
        return ()


def _why(holders: tuple[Holder, ...], reason: str, now: float) -> str:
    if reason:
        return f": {reason}"
    if not holders:
        return ""
    first, *others = holders
    more = f" and {len(others)} more" if others else ""
    return f": held by {describe(first, now)}{more}"
