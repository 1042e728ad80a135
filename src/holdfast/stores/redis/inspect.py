"""Reading what the Redis backend has stored: one name, or all of them page by page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from holdfast.claim import Holder, LockInfo, Mode, Waiter, read_label
from holdfast.core.contract import Page
from holdfast.errors import BackendUnavailable, Incompatible
from holdfast.stores.redis.connection import Refused, pack
from holdfast.stores.redis.replies import Keys, refusal
from holdfast.stores.redis.routes import Pool, Route

__all__ = ["Survey", "read_standing", "readable_standing"]

_MODES = {b"x": Mode.EXCLUSIVE, b"s": Mode.SHARED, b"n": Mode.SLOTS}
SCAN_ROUNDS = 16
"""A page is given up after so many steps of SCAN, however little they found."""


def readable_standing(name: str, reply: Any, store: str) -> LockInfo:
    """The same; what can't be read is said in its place."""
    try:
        return read_standing(name, reply, store)
    except Incompatible as error:
        why = f"what is stored under this name can't be read: {error}"
        return LockInfo(name, 0, (), (), why)


def read_standing(name: str, reply: Any, store: str) -> LockInfo:
    """Reads the answer of ``look.lua``; raises what else it is."""
    if type(reply) is not list or reply[:1] == [b"incompatible"]:
        raise refusal(reply, store, name)
    try:
        limit, now, holders, waiters = reply
        return LockInfo(
            name,
            int(limit) if holders or waiters else 0,
            tuple(_holder(row, now) for row in holders),
            tuple(_waiter(row) for row in waiters),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BackendUnavailable(f"{store} gave an answer that is not understood") from error


def _holder(row: Sequence[bytes], now: int) -> Holder:
    mode, token, ends, slots, label = row
    numbers = () if slots == b"-" else tuple(int(slot) for slot in slots.split(b","))
    # A token is the server's time in µs unless its clock went back since the last one.
    since = min(int(token) / 1_000_000, now / 1000)
    remaining = max(0.0, (int(float(ends)) - now) / 1000)
    label_parts = read_label(label.decode(errors="replace"))
    return Holder(*label_parts, _MODES[mode], int(token), numbers, since, remaining)


def _waiter(row: Sequence[bytes]) -> Waiter:
    mode, behind, since, label = row
    label_parts = read_label(label.decode(errors="replace"))
    return Waiter(*label_parts, _MODES[mode], int(since) / 1_000_000, int(behind))


def read_scan(reply: Any, keys: Keys, store: str) -> tuple[str, list[str]]:
    """Where SCAN goes on, and the names that it found."""
    try:
        following, found = reply
        return following.decode(), [keys.name(key.decode(errors="replace")) for key in found]
    except (ValueError, TypeError, AttributeError) as error:
        raise BackendUnavailable(f"{store} gave an answer that is not understood") from error


class Survey:
    """Walks the keyspace with SCAN, node by node, and never holds more than a page."""

    def __init__(
        self,
        keys: Keys,
        route: Route,
        standings: Callable[[Sequence[str]], Awaitable[list[LockInfo]]],
    ) -> None:
        self._keys, self._route, self._standings = keys, route, standings

    async def page(self, prefix: str, cursor: str | None, limit: int) -> Page:
        """A cursor is ``node.scan.name``: the name up to which that step was already given."""
        node, scan, after = _read_cursor(cursor)
        pools = await self._route.pools()
        for _ in range(SCAN_ROUNDS):
            if node >= len(pools):
                return Page([], None)
            following, names = await self._step(pools[node], prefix, scan, limit)
            fresh = [name for name in sorted(set(names)) if name > after]
            found = await self._standings(fresh)
            used = [each for each in found if each.holders or each.waiters or each.notice]
            if len(used) > limit:
                return Page(used[:limit], f"{node}.{scan}.{used[limit - 1].name}")
            after, scan = "", following
            if scan == "0":
                node += 1
            if used:
                end = scan == "0" and node >= len(pools)
                return Page(used, None if end else f"{node}.{scan}.")
        return Page([], f"{node}.{scan}.")

    async def _step(self, pool: Pool, prefix: str, scan: str, limit: int) -> tuple[str, list[str]]:
        count = max(10, min(limit, 1000))
        command = pack("SCAN", scan, "MATCH", self._keys.pattern(prefix), "COUNT", count)
        reply = await pool.call(command)
        if isinstance(reply, Refused):
            raise refusal(reply, str(pool.address), prefix)
        return read_scan(reply, self._keys, str(pool.address))


def _read_cursor(cursor: str | None) -> tuple[int, str, str]:
    if cursor is None:
        return 0, "0", ""
    node, scan, after = cursor.split(".", 2)
    return int(node), scan, after
