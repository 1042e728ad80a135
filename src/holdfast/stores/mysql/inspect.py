"""What MySQL tells about itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from holdfast.core.contract import Finding
from holdfast.stores.mysql.connect import MOST_SKEW_SECONDS, ahead_seconds
from holdfast.stores.mysql.protocol import Result
from holdfast.stores.mysql.row import MICROS
from holdfast.stores.mysql.sql import UTC_MICROS

__all__ = ["clock_finding", "findings"]

_FACTS = (
    b"SHOW SESSION VARIABLES WHERE Variable_name IN ('version', 'log_bin', 'sync_binlog', "
    b"'innodb_flush_log_at_trx_commit', 'wsrep_on', 'rpl_semi_sync_master_enabled', "
    b"'rpl_semi_sync_source_enabled'); SHOW SESSION STATUS LIKE 'Ssl_cipher'; "
    b"SELECT CURRENT_USER(), (SELECT COUNT(*) FROM information_schema.PROCESSLIST "
    b"WHERE COMMAND LIKE 'Binlog Dump%')"
)

Ask = Callable[[bytes], Awaitable[list[Result]]]


async def findings(ask: Ask) -> list[Finding]:
    """What the guarantees rest on, as the server's settings tell."""
    variables, cipher, rest = await ask(_FACTS)
    facts = {(row[0] or b"").decode(): (row[1] or b"").decode() for row in variables.rows}
    account, replicas = rest.rows[0]
    return [
        Finding("server", f"{facts.get('version', '?')}, as {(account or b'?').decode()}"),
        _durability(facts),
        _replication(facts, int(replicas or 0)),
        _privacy(bool(cipher.rows and cipher.rows[0][1])),
    ]


async def clock_finding(ask: Ask, wall: Callable[[], float]) -> Finding:
    """Of a Galera node: how far its clock is from ours. All nodes must agree."""
    before = wall()
    (told,) = await ask(b"SELECT " + UTC_MICROS.encode())
    ahead = ahead_seconds(int(told.rows[0][0] or 0) / MICROS, before, wall())
    text = (
        f"this node's clock is {abs(ahead):.3f} s {'behind' if ahead < 0 else 'ahead of'} this "
        f"host's; nodes end holds by their own clocks, and {MOST_SKEW_SECONDS:g} s are allowed"
    )
    return Finding("clock", text, "warning" if abs(ahead) > MOST_SKEW_SECONDS else "ok")


def _durability(facts: dict[str, str]) -> Finding:
    flush = facts.get("innodb_flush_log_at_trx_commit", "?")
    if flush != "1":
        text = (
            f"innodb_flush_log_at_trx_commit is {flush}: "
            "a crash of its machine may undo grants that were told"
        )
        return Finding("durability", text, "warning")
    return Finding("durability", "grants are on disk before they are told")


def _replication(facts: dict[str, str], replicas: int) -> Finding:
    if facts.get("wsrep_on") == "ON":
        return Finding("failover", "a Galera cluster: grants are certified by all its nodes")
    semi = ("rpl_semi_sync_master_enabled", "rpl_semi_sync_source_enabled")
    if replicas and not any(facts.get(word) == "ON" for word in semi):
        text = "replicas follow asynchronously: a failover may undo the last grants"
        return Finding("failover", text, "warning")
    return Finding("failover", "semi-synchronous replicas" if replicas else "no replica follows")


def _privacy(tls: bool) -> Finding:
    if tls:
        return Finding("connection", "TLS")
    return Finding("connection", "without TLS: set ssl_mode=verify_identity across networks")
