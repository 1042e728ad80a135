"""Holders and waiters of named locks, decoded for ``inspect()`` and ``list()``."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.claim import Holder, Mode, Waiter, read_holds, read_label
from holdfast.stores.mysql.protocol import Row
from holdfast.stores.mysql.row import MICROS

__all__ = ["holders_of", "waiter_of"]


def holders_of(rows: Sequence[Row]) -> tuple[tuple[Holder, ...], int]:
    """Returns the holders and the capacity from the rows of ``look``. Rows of one hold are one
    holder with several slots."""
    holders: dict[int, Holder] = {}
    limit = 0
    for row in rows:
        slot, capacity, token, since, ttl = (int(row[place] or 0) for place in (1, 2, 3, 5, 6))
        limit = capacity
        slots = holders[token].slots if token in holders else ()
        slots += (slot,) if slot >= 0 else ()
        mode = Mode.SLOTS if slots else Mode.EXCLUSIVE
        who = read_label((row[4] or b"").decode(errors="replace"))
        holders[token] = Holder(*who, mode, token, slots, since / MICROS, ttl / MICROS)
    return tuple(holders.values()), limit


def waiter_of(request: str) -> Waiter | None:
    """Decodes the comment of a waiting request; None if it has none of ours."""
    lock, _, comment = request.partition("/*hf ")
    try:
        label, since = comment.partition("*/")[0].split(" ")
        text = bytes.fromhex(label.replace("-", "")).decode()
        mode = Mode.SLOTS if ":t'" in lock else Mode.EXCLUSIVE
        return Waiter(*read_label(text), mode, int(since) / MICROS, 0, read_holds(text))
    except ValueError:
        return None
