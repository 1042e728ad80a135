"""Holders and waiters as ``ls``, ``show`` and ``break`` print them, for people and programs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from holdfast.cli.output.tables import print_table
from holdfast.cli.output.text import duration, since, write

if TYPE_CHECKING:
    from holdfast import Holder, LockInfo, Waiter

__all__ = ["as_plain_data", "print_holders", "print_json", "print_waiters", "waiting"]


def as_plain_data(info: LockInfo) -> dict[str, Any]:
    """What a program reads. Times are seconds since the epoch; owners are in none of it."""
    return {
        "name": info.name,
        "kind": info.kind,
        "limit": info.limit,
        "holders": [_plain(holder) for holder in info.holders],
        "waiters": [_plain(waiter) for waiter in info.waiters],
        "notice": info.notice,
    }


def _plain(who: Holder | Waiter) -> dict[str, Any]:
    fields = {**who._asdict(), "mode": str(who.mode)}
    return {word: None if _endless(value) else value for word, value in fields.items()}


def _endless(value: object) -> bool:
    """Whether it is NaN or infinite, which JSON can't hold."""
    return isinstance(value, float) and not math.isfinite(value)


def print_json(data: object) -> None:
    """All of it in ASCII, so that no text of others reaches a terminal as it is."""
    import json

    print(json.dumps(data, indent=2))


def waiting(info: LockInfo) -> int:
    """How many wait, also behind the first of their process."""
    return sum(1 + waiter.behind for waiter in info.waiters)


def print_holders(holders: tuple[Holder, ...]) -> None:
    """One row for each."""
    rows = [
        (
            f"{holder.host} pid {holder.pid} ({holder.thread})",
            mode(holder),
            str(holder.token),
            since(holder.since),
            duration(holder.remaining),
            holder.note,
        )
        for holder in holders
    ]
    print_table(("HELD BY", "MODE", "TOKEN", "SINCE", "LEFT", "NOTE"), rows)


def print_waiters(waiters: tuple[Waiter, ...]) -> None:
    """One row per waiter, in the order of the queue."""
    rows = [
        (
            f"{waiter.host} pid {waiter.pid} ({waiter.thread})",
            str(waiter.mode),
            since(waiter.since),
            f"and {waiter.behind} more of its process" if waiter.behind else "",
            waiter.note,
        )
        for waiter in waiters
    ]
    write("\n")
    print_table(("WAITING", "MODE", "SINCE", "BEHIND IT", "NOTE"), rows)


def mode(holder: Holder) -> str:
    """How it is held; of a semaphore, which slots."""
    slots = ",".join(map(str, holder.slots))
    return f"{holder.mode} {slots}".rstrip()
