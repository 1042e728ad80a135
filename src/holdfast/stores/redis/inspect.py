"""Reads what a Redis store has: one lock, all locks page by page, and the settings of the servers
that its guarantees depend on (on each new connection, and for ``check()``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from holdfast.claim import Holder, LockInfo, Mode, Waiter, read_holds, read_label
from holdfast.core.contract import Finding, Page
from holdfast.errors import BackendUnavailable, GuaranteeNotMet, Incompatible
from holdfast.io.resp import RedisRefused, pack
from holdfast.stores.redis.replies import Keys, clock_time, refusal
from holdfast.stores.redis.routes import Pool, Route
from holdfast.stores.redis.url import Greeting, RedisOptions

__all__ = [
    "Survey",
    "eviction_greeting",
    "findings",
    "lock_info_or_notice",
    "read_info",
    "read_lock_info",
]

_MODES = {b"x": Mode.EXCLUSIVE, b"s": Mode.SHARED, b"n": Mode.SLOTS}
SCAN_ROUNDS = 16
"""A page ends after this many steps of SCAN, even if they found nothing."""


def lock_info_or_notice(name: str, reply: Any, store: str) -> LockInfo:
    """Reads the reply of ``look.lua``; for damaged data, a ``LockInfo`` with a notice."""
    try:
        return read_lock_info(name, reply, store)
    except Incompatible as error:
        why = f"what is stored under this name can't be read: {error}"
        return LockInfo(name, 0, (), (), why)


def read_lock_info(name: str, reply: Any, store: str) -> LockInfo:
    """Reads the reply of ``look.lua``. Raises the error of any other reply."""
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
        raise BackendUnavailable(f"{store} sent a reply that can't be read") from error


def _holder(row: Sequence[bytes], now: int) -> Holder:
    mode, token, ends, slots, label = row
    numbers = () if slots == b"-" else tuple(int(slot) for slot in slots.split(b","))
    # A token is the server's time in µs, unless its clock went back since the previous token.
    since = min(int(token) / 1_000_000, now / 1000)
    remaining = max(0.0, (int(float(ends)) - now) / 1000)
    label_parts = read_label(label.decode(errors="replace"))
    return Holder(*label_parts, _MODES[mode], int(token), numbers, since, remaining)


def _waiter(row: Sequence[bytes]) -> Waiter:
    mode, behind, since, label = row
    text, began = label.decode(errors="replace"), int(since) / 1_000_000
    return Waiter(*read_label(text), _MODES[mode], began, int(behind), read_holds(text))


def read_scan(reply: Any, keys: Keys, store: str) -> tuple[str, list[str]]:
    """The next cursor of SCAN, and the lock names that it found."""
    try:
        following, found = reply
        return following.decode(), [keys.name(key.decode(errors="replace")) for key in found]
    except (ValueError, TypeError, AttributeError) as error:
        raise BackendUnavailable(f"{store} sent a reply that can't be read") from error


class Survey:
    """Reads the keyspace with SCAN, node by node. Keeps at most one page in memory."""

    def __init__(
        self,
        keys: Keys,
        route: Route,
        lock_infos: Callable[[Sequence[str]], Awaitable[list[LockInfo]]],
    ) -> None:
        self._keys, self._route, self._lock_infos = keys, route, lock_infos

    async def page(self, prefix: str, cursor: str | None, limit: int) -> Page:
        """A cursor is ``node.scan.name``: names up to ``name`` of that step were returned."""
        node, scan, after = _read_cursor(cursor)
        pools = await self._route.pools()
        for _ in range(SCAN_ROUNDS):
            if node >= len(pools):
                return Page([], None)
            following, names = await self._step(pools[node], prefix, scan, limit)
            fresh = [name for name in sorted(set(names)) if name > after]
            found = await self._lock_infos(fresh)
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
        reply = await pool.request(command)
        if isinstance(reply, RedisRefused):
            raise refusal(reply, str(pool.endpoint.address), prefix)
        return read_scan(reply, self._keys, str(pool.endpoint.address))


def _read_cursor(cursor: str | None) -> tuple[int, str, str]:
    if cursor is None:
        return 0, "0", ""
    node, scan, after = cursor.split(".", 2)
    return int(node), scan, after


def read_info(reply: Any) -> dict[str, str]:
    """The fields of a reply to INFO."""
    lines = reply.decode(errors="replace").splitlines() if isinstance(reply, bytes) else []
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _evicts(info: dict[str, str]) -> bool:
    policy = info.get("maxmemory_policy", "noeviction")
    return policy != "noeviction" and info.get("maxmemory", "0") != "0"


def eviction_greeting(store: str) -> Greeting:
    """Refuses a server that may evict locks when its memory is full; checked on each connection."""

    def judge(reply: Any) -> None:
        info = read_info(reply)
        if _evicts(info):
            raise GuaranteeNotMet(
                f"{store} may evict locks: its maxmemory-policy is {info['maxmemory_policy']!r}; "
                "use noeviction, or set ?allow_eviction=on"
            )

    return Greeting(pack("INFO", "memory"), judge)


async def findings(
    options: RedisOptions, route: Route, loss_key: str, wall: float
) -> list[Finding]:
    """All findings of ``check()``, node by node. ``loss_key`` is the key of loss protection."""
    found: list[Finding] = []
    for pool in await route.pools():
        info = await _info(pool)
        found += await _node(pool, info, options)
        if info and options.loss_protection:
            found += await _pause(pool, info, options, loss_key, wall)
    found.append(_loss(options))
    if options.access.tls and options.access.options.get("ssl_cert_reqs") == "none":
        found.append(Finding("tls", "certificates are not verified", "warning"))
    if options.interop:
        found.append(
            Finding("interop", "redis-py's Lock has no queue: order is not kept", "warning")
        )
    return found


async def _info(pool: Pool) -> dict[str, str]:
    """The INFO fields of a node; empty if this user may not run INFO."""
    info: dict[str, str] = {}
    for section in ("server", "memory", "persistence", "replication"):
        reply = await pool.request(pack("INFO", section))
        if isinstance(reply, RedisRefused):
            if reply.code != "NOPERM":
                raise refusal(reply, f"redis at {pool.endpoint.address}", "")
            return {}
        info |= read_info(reply)
    return info


async def _node(pool: Pool, info: dict[str, str], options: RedisOptions) -> list[Finding]:
    where = f"redis at {pool.endpoint.address}"
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
    pool: Pool, info: dict[str, str], options: RedisOptions, loss_key: str, wall: float
) -> list[Finding]:
    """A warning if loss protection grants nothing now, or from the next request on."""
    reply = await pool.request(pack("HMGET", loss_key, "mark", "barred"))
    mark, barred = reply if type(reply) is list and len(reply) == 2 else (None, None)
    server = f"{info.get('run_id', '')}:{info.get('master_replid', '')}"
    if mark != server.encode():
        detail = f"it grants nothing for {options.max_ttl:g} s from the next request on"
    elif type(barred) is bytes and barred.isdigit() and int(barred[:16]) > wall * 1000:
        detail = f"it grants nothing before {clock_time(int(barred[:16]))}"
    else:
        return []
    detail += ": it may have lost holds (`holdfast init` marks a new server as new)"
    return [Finding(f"redis at {pool.endpoint.address}", detail, "warning")]


async def _wakeups(where: str, pool: Pool) -> list[Finding]:
    reply = await pool.request(pack("PUBSUB", "NUMSUB", "holdfast"))
    if not isinstance(reply, RedisRefused):
        return []
    detail = "PUBSUB NUMSUB is not allowed: a waiter whose process is gone delays the queue for 2 s"
    return [Finding(where, detail, "warning")]


def _product(info: dict[str, str]) -> str:
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', '?')}"


def _role(where: str, info: dict[str, str], options: RedisOptions) -> Finding:
    if info.get("role") != "master":
        return Finding(where, "it is a replica: locks need the master", "broken")
    connected = info.get("connected_slaves", "0")
    count = int(connected) if connected.isdecimal() else 0
    if count < options.replicas:
        detail = f"{count} replicas are connected, {options.replicas} are required"
        return Finding(where, detail, "broken")
    return Finding(where, f"master with {count} replicas")


def _memory(where: str, info: dict[str, str], options: RedisOptions) -> Finding:
    policy = info.get("maxmemory_policy", "?")
    if _evicts(info):
        level = "warning" if options.allow_eviction else "broken"
        return Finding(where, f"maxmemory-policy {policy} may evict locks", level)
    return Finding(where, f"maxmemory-policy {policy}, nothing is evicted")


def _persistence(where: str, info: dict[str, str], options: RedisOptions) -> Finding:
    if info.get("aof_enabled") == "1":
        return Finding(where, "the append-only file is on: a restart keeps locks")
    if options.loss_protection:
        return Finding(where, "no append-only file: after a restart nothing is granted for max_ttl")
    return Finding(where, "no append-only file: a restart loses locks", "warning")


def _loss(options: RedisOptions) -> Finding:
    if options.loss_protection:
        return Finding("loss protection", f"on, max_ttl {options.max_ttl:g} s")
    return Finding(
        "loss protection",
        "off: after a failover, a restart without data or FLUSHALL, two clients may hold one lock",
        "warning",
    )
