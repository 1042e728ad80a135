"""Why a name can't be had, in words: for timeouts, the log, and ``holdfast why``."""

# Without "from __future__ import annotations": see holdfast.lazy.
import math

from holdfast.claim import LockInfo, Mode, Waiter, escaped
from holdfast.durations import counted

__all__ = ["clauses", "next_grant"]


def clauses(info: LockInfo, now: float) -> list[str]:
    """What ``LockInfo.explain`` returns."""
    found = [_held(info, now), _ends(info), _waiting(info.waiters, now)]
    if info.notice and found[0]:
        found[0] += f" ({escaped(info.notice)})"
    return [clause for clause in found if clause]


def next_grant(info: LockInfo) -> str:
    """What must happen so that the next one gets a name that is held: sentences, for people."""
    if _has_slots(info):
        free = max(0, info.limit - _taken(info))
        if free and not info.waiters:
            return f"Up to {counted(free, 'slot')} can be acquired at once."
        waits = "The first waiter takes the free slots at once or needs more. " if free else ""
        return f"{waits}{'More are' if free else 'A slot is'} free when {_released(info)}."
    if info.holders[0].mode is Mode.SHARED:
        readers = "" if info.waiters else "A reader gets it at once. "
        return f"{readers}A writer gets it when {_released(info)}."
    return f"It is free when {_released(info)}."


def _has_slots(info: LockInfo) -> bool:
    return info.holders[0].mode is Mode.SLOTS


def _taken(info: LockInfo) -> int:
    return sum(len(holder.slots) for holder in info.holders)


def _held(info: LockInfo, now: float) -> str:
    if not info.holders:
        return ""
    first, *others = info.holders
    more = f" and {len(others)} more" if others else ""
    slots = ""
    if _has_slots(info):
        taken = _taken(info)
        slots = f"; {taken} of {counted(info.limit, 'slot')} {'is' if taken == 1 else 'are'} taken"
    return f"held by {first}, for {_seconds(now - first.since)}{more}{slots}"


def _left(info: LockInfo) -> float:
    """The most seconds until the next one gets it if all holders are dead: the first end gives a
    slot, the last one a name that all holders must leave."""
    ends = [holder.remaining for holder in info.holders]
    return min(ends) if _has_slots(info) else max(ends)


def _ends(info: LockInfo) -> str:
    """When the next one gets the name if all its holders are dead."""
    if not info.holders:
        return ""
    left, one = _left(info), len(info.holders) == 1
    which = "the hold ends" if one else "the holds end"
    if not math.isfinite(left):
        return f"{which} with {'its connection' if one else 'their connections'}"
    if not one and _has_slots(info):
        which, one = "the first of the holds ends", True
    return f"{which} within {_seconds(left)} unless {'it is' if one else 'they are'} renewed"


def _released(info: LockInfo) -> str:
    left, one = _left(info), len(info.holders) == 1
    if one:
        holders, dead, ends = "its holder releases it", "that process is", "its process ends"
    elif _has_slots(info):
        holders, dead = "one of its holders releases it", "the one whose hold ends first is"
        ends = "one of their processes ends"
    else:
        holders, dead, ends = "its holders release it", "they are", "their processes end"
    if math.isfinite(left):
        ends = f"within {_seconds(left)} if {dead} dead"
    return f"{holders}, or {ends}"


def _waiting(waiters: tuple[Waiter, ...], now: float) -> str:
    if not waiters:
        return ""
    first = waiters[0]
    waiting = sum(1 + waiter.behind for waiter in waiters)
    who = f"{escaped(first.host)} pid {first.pid} ({escaped(first.thread)})"
    if waiting == 1:
        return f"{who} waits for it, for {_seconds(now - first.since)}"
    return f"{waiting:,} wait for it, the first one, {who}, for {_seconds(now - first.since)}"


def _seconds(value: float) -> str:
    return f"{max(0.0, value):.0f} s"
