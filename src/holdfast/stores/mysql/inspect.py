"""Findings of ``check()`` about the server, for both MySQL stores."""

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

Execute = Callable[[bytes], Awaitable[list[Result]]]


async def findings(execute: Execute) -> list[Finding]:
    """Returns the server settings on which the guarantees depend."""
    variables, cipher, rest = await execute(_FACTS)
    facts = {(row[0] or b"").decode(): (row[1] or b"").decode() for row in variables.rows}
    account, replicas = rest.rows[0]
    return [
        Finding("server", f"{facts.get('version', '?')}, as {(account or b'?').decode()}"),
        _durability(facts),
        _replication(facts, int(replicas or 0)),
        _privacy(bool(cipher.rows and cipher.rows[0][1])),
    ]


async def clock_finding(execute: Execute, wall: Callable[[], float]) -> Finding:
    """Compares the clock of a Galera node with ours: the clocks of all nodes must agree."""
    before = wall()
    (clock,) = await execute(b"SELECT " + UTC_MICROS.encode())
    ahead = ahead_seconds(int(clock.rows[0][0] or 0) / MICROS, before, wall())
    text = (
        f"this node's clock is {abs(ahead):.3f} s {'behind' if ahead < 0 else 'ahead of'} this "
        "host's clock. Every node ends holds by its own clock; a difference of "
        f"{MOST_SKEW_SECONDS:g} s is allowed"
    )
    return Finding("clock", text, "warning" if abs(ahead) > MOST_SKEW_SECONDS else "ok")


def _durability(facts: dict[str, str]) -> Finding:
    flush = facts.get("innodb_flush_log_at_trx_commit", "?")
    if flush != "1":
        text = (
            f"innodb_flush_log_at_trx_commit is {flush}: "
            "a crash of the server's machine may undo confirmed grants"
        )
        return Finding("durability", text, "warning")
    return Finding("durability", "a grant is on disk before it is confirmed")


def _replication(facts: dict[str, str], replicas: int) -> Finding:
    if facts.get("wsrep_on") == "ON":
        return Finding("failover", "a Galera cluster: grants are certified by all its nodes")
    semi = ("rpl_semi_sync_master_enabled", "rpl_semi_sync_source_enabled")
    if replicas and not any(facts.get(word) == "ON" for word in semi):
        text = "replication is asynchronous: a failover may undo the last grants"
        return Finding("failover", text, "warning")
    return Finding(
        "failover", "semi-synchronous replicas" if replicas else "no replica is connected"
    )


def _privacy(tls: bool) -> Finding:
    if tls:
        return Finding("connection", "TLS")
    return Finding("connection", "without TLS: set ssl_mode=verify_identity across networks")
