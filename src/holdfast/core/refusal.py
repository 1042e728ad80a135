"""The texts for a caller that did not get a lock: the holder, since when, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.claim import Claim, Holder, LockInfo
from holdfast.core.hold import AcquireOptions
from holdfast.errors import HoldfastError, LockTimeout

if TYPE_CHECKING:
    from holdfast.core.engine import Engine

__all__ = ["describe", "describe_wait", "timed_out"]


def describe(holder: Holder, now: float) -> str:
    """One holder, for people."""
    return f"{holder}, for {max(0.0, now - holder.since):.0f} s"


async def timed_out(
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


async def describe_wait(engine: Engine, claim: Claim, waited: float, reason: str) -> str:
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
    return f": held by {describe(first, now)}{more}{notice}"
