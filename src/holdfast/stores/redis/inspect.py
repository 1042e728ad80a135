"""Reading what the Redis backend has stored: one name, or all of them page by page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from holdfast.claim import Holder, LockInfo, Mode, Waiter, read_label
from holdfast.core.contract import Finding, Page
from holdfast.errors import BackendUnavailable, GuaranteeNotMet, Incompatible
from holdfast.io.resp import Refused, pack
from holdfast.stores.redis.replies import Keys, clock_time, refusal
from holdfast.stores.redis.routes import Pool, Route
from holdfast.stores.redis.url import Greeting, Options

__all__ = [
    "Survey",
    "eviction_greeting",
    "findings",
    "read_info",
    "read_standing",
    "readable_standing",
]

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


def read_info(reply: Any) -> dict[str, str]:
    """The fields of INFO."""
    lines = reply.decode(errors="replace").splitlines() if isinstance(reply, bytes) else []
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _evicts(info: dict[str, str]) -> bool:
    policy = info.get("maxmemory_policy", "noeviction")
    return policy != "noeviction" and info.get("maxmemory", "0") != "0"


def eviction_greeting(store: str) -> Greeting:
    """Asks every new connection whether the server would throw locks away to make room."""

    def judge(reply: Any) -> None:
        info = read_info(reply)
        if _evicts(info):
            raise GuaranteeNotMet(
                f"{store} may evict locks: its maxmemory-policy is {info['maxmemory_policy']!r}; "
                "use noeviction, or say ?allow_eviction=on"
            )

    return Greeting(pack("INFO", "memory"), judge)


async def findings(options: Options, route: Route, noted: str, wall: float) -> list[Finding]:
    """One round of looking, node by node; ``noted`` is the key of loss protection's mark."""
    found: list[Finding] = []
    for pool in await route.pools():
        info = await _info(pool)
        found += await _node(pool, info, options)
        if info and options.loss_protection:
            found += await _pause(pool, info, options, noted, wall)
    found.append(_loss(options))
    if options.access.tls and options.access.options.get("ssl_cert_reqs") == "none":
        found.append(Finding("tls", "certificates are not verified", "warning"))
    if options.interop:
        found.append(
            Finding("interop", "redis-py's Lock has no line: order is not kept", "warning")
        )
    return found


async def _info(pool: Pool) -> dict[str, str]:
    """What a node tells about itself; empty where this user may not ask."""
    info: dict[str, str] = {}
    for section in ("server", "memory", "persistence", "replication"):
        reply = await pool.call(pack("INFO", section))
        if isinstance(reply, Refused):
            if reply.code != "NOPERM":
                raise refusal(reply, f"redis at {pool.address}", "")
            return {}
        info |= read_info(reply)
    return info


async def _node(pool: Pool, info: dict[str, str], options: Options) -> list[Finding]:
    where = f"redis at {pool.address}"
    if not info:
        return [Finding(where, "INFO is not allowed: nothing can be verified", "warning")]
    return [
        Finding(where, f"{_product(info)}, run {info.get('run_id', '?')[:8]}"),
        _role(where, info, options),
        _memory(where, info, options),
        _persistence(where, info, options),
        *await _wakeups(where, pool),
    ]


async def _pause(
    pool: Pool, info: dict[str, str], options: Options, noted: str, wall: float
) -> list[Finding]:
    """Whether loss protection lets nothing be granted now, or from the next request on."""
    reply = await pool.call(pack("HMGET", noted, "mark", "barred"))
    mark, barred = reply if type(reply) is list and len(reply) == 2 else (None, None)
    server = f"{info.get('run_id', '')}:{info.get('master_replid', '')}"
    if mark != server.encode():
        detail = f"it grants nothing for {options.max_ttl:g} s from the next request on"
    elif type(barred) is bytes and barred.isdigit() and int(barred[:16]) > wall * 1000:
        detail = f"it grants nothing before {clock_time(int(barred[:16]))}"
    else:
        return []
    detail += ": it may have lost holds (`holdfast init` marks a new one as new)"
    return [Finding(f"redis at {pool.address}", detail, "warning")]


async def _wakeups(where: str, pool: Pool) -> list[Finding]:
    reply = await pool.call(pack("PUBSUB", "NUMSUB", "holdfast"))
    if not isinstance(reply, Refused):
        return []
    detail = (
        "PUBSUB NUMSUB is not allowed: a waiter whose process is gone holds up the line for 2 s"
    )
    return [Finding(where, detail, "warning")]


def _product(info: dict[str, str]) -> str:
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', '?')}"


def _role(where: str, info: dict[str, str], options: Options) -> Finding:
    if info.get("role") != "master":
        return Finding(where, "it is a replica: locks need the master", "broken")
    connected = info.get("connected_slaves", "0")
    count = int(connected) if connected.isdecimal() else 0
    if count < options.replicas:
        detail = f"{count} replicas are connected, {options.replicas} are asked for"
        return Finding(where, detail, "broken")
    return Finding(where, f"master with {count} replicas")


def _memory(where: str, info: dict[str, str], options: Options) -> Finding:
    policy = info.get("maxmemory_policy", "?")
    if _evicts(info):
        level = "warning" if options.allow_eviction else "broken"
        return Finding(where, f"maxmemory-policy {policy} may evict locks", level)
    return Finding(where, f"maxmemory-policy {policy}, nothing is evicted")


def _persistence(where: str, info: dict[str, str], options: Options) -> Finding:
    if info.get("aof_enabled") == "1":
        return Finding(where, "the append-only file is on: a restart keeps locks")
    if options.loss_protection:
        return Finding(where, "no append-only file: after a restart nothing is granted for max_ttl")
    return Finding(where, "no append-only file: a restart loses locks", "warning")


def _loss(options: Options) -> Finding:
    if options.loss_protection:
        return Finding("loss protection", f"on, max_ttl {options.max_ttl:g} s")
    return Finding(
        "loss protection",
        "off: a failover, a restart without its data or FLUSHALL may let two hold at once",
        "warning",
    )
