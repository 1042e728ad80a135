"""What is told to somebody who did not get a lock: by whom it is held, since when, why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.claim import Claim, Holder, LockInfo
from holdfast.core.hold import Ask
from holdfast.errors import HoldfastError, LockTimeout

if TYPE_CHECKING:
    from holdfast.core.engine import Engine

__all__ = ["describe", "timed_out", "told_so_far"]


def describe(holder: Holder, now: float) -> str:
    """One holder, for people."""
    return f"{holder}, for {max(0.0, now - holder.since):.0f} s"


async def timed_out(engine: Engine, claim: Claim, ask: Ask, reason: str) -> LockTimeout:
    """The error for somebody whose time is over; names the holder where the store can tell."""
    if not ask.explain:
        return LockTimeout("", name=claim.name)
    standing = await _look(engine, claim)
    waited = f"within {ask.timeout:g} s" if ask.timeout else "at once"
    message = f"{claim.name!r} on {engine.store.display} was not acquired {waited}"
    message += _why(standing, reason, engine.runtime.wall())
    holder = standing.holders[0] if standing and standing.holders else None
    return LockTimeout(message, name=claim.name, holder=holder)


async def told_so_far(engine: Engine, claim: Claim, waited: float, reason: str) -> str:
    """The line for the log of somebody who waits for long."""
    why = _why(await _look(engine, claim), reason, engine.runtime.wall())
    return f"waiting for {claim.name!r} on {engine.store.display} for {waited:.0f} s{why}"


async def _look(engine: Engine, claim: Claim) -> LockInfo | None:
    try:
        return await engine.backend.look(claim.name)
    except HoldfastError:
        return None


def _why(standing: LockInfo | None, reason: str, now: float) -> str:
    if reason:
        return f": {reason}"
    if standing is None or not standing.holders:
        return ""
    first, *others = standing.holders
    more = f" and {len(others)} more" if others else ""
    notice = f" ({standing.notice})" if standing.notice else ""
    return f": held by {describe(first, now)}{more}{notice}"
