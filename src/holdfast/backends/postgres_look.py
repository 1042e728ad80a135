"""What PostgreSQL tells about names and about itself."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from psycopg.pq.abc import PGresult

from holdfast.claim import Holder, Mode, Standing, Waiter, read_label
from holdfast.core.contract import Finding
from holdfast.wires.postgres_statement import Request, Statement

__all__ = ["findings", "standing_of"]

Ask = Callable[[Request], Awaitable[PGresult]]


def standing_of(answer: PGresult, row: int) -> Standing:
    """A row of name, capacity, holders and waiters, the last two as JSON."""
    name, capacity, holders, waiters = (answer.get_value(row, column) for column in range(4))
    return Standing(
        (name or b"").decode(),
        int(capacity or 0),
        tuple(_holder(*values) for values in json.loads(holders or b"[]")),
        tuple(_waiter(*values) for values in json.loads(waiters or b"[]")),
    )


def _holder(
    label: str, mode: str, token: int, slots: list[int] | None, since: float, remaining: float
) -> Holder:
    host, pid, thread, note = read_label(label)
    held = tuple(slots or ())
    return Holder(host, pid, thread, note, Mode(mode), token, held, since, remaining)


def _waiter(label: str, mode: str, since: float, behind: int) -> Waiter:
    return Waiter(*read_label(label), Mode(mode), since, behind)


async def findings(ask: Ask, settings: Statement, waiting: Finding) -> list[Finding]:
    """What the guarantees rest on, as the server's settings tell."""
    answer = await ask((settings, ()))
    seen: dict[str, Any] = json.loads(answer.get_value(0, 0) or b"{}")
    return [
        Finding("server", f"PostgreSQL {seen['version']}, as {seen['role']}"),
        _durability(seen),
        _replication(seen),
        _privacy(seen),
        _schema(seen),
        waiting,
    ]


def _durability(seen: dict[str, Any]) -> Finding:
    if seen["fsync"] != "on":
        text = "fsync is off: a crash of its machine may undo grants that were told"
        return Finding("durability", text, "warning")
    return Finding("durability", "grants are on disk before they are told")


def _replication(seen: dict[str, Any]) -> Finding:
    if seen["standbys"]:
        return Finding("failover", f"synchronous standbys: {seen['standbys']}")
    if seen["replicas"]:
        text = "standbys replicate asynchronously: a failover may undo the last grants"
        return Finding("failover", text, "warning")
    return Finding("failover", "no standby is connected")


def _privacy(seen: dict[str, Any]) -> Finding:
    if seen["tls"]:
        return Finding("connection", "TLS")
    if seen["local"]:
        return Finding("connection", "without TLS, on this machine")
    return Finding("connection", "without TLS: set sslmode=verify-full", "warning")


def _schema(seen: dict[str, Any]) -> Finding:
    if seen["open"]:
        text = (
            "everybody may create functions beside Holdfast's, which could then be run in their "
            "stead: REVOKE CREATE ON SCHEMA … FROM PUBLIC"
        )
        return Finding("schema", text, "warning")
    return Finding("schema", "functions look up nothing by the caller's search_path")
