"""What PostgreSQL tells about names and about itself."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from math import isfinite
from typing import Any

from psycopg.pq.abc import PGresult

from holdfast.claim import Holder, LockInfo, Mode, Waiter, read_label
from holdfast.core.contract import Finding
from holdfast.errors import Incompatible
from holdfast.stores.postgres.statement import Request, Statement

__all__ = ["damaged", "findings", "finite", "standing_of", "standing_or_notice", "whole"]

Ask = Callable[[Request], Awaitable[PGresult]]


LARGEST_TOKEN = 2**63 - 1
MOST_SLOTS = 65536


def damaged(name: str, store: str, cause: object) -> Incompatible:
    """The error for a name about which something is stored that no version has written."""
    return Incompatible(
        f"what {store} has stored for {name!r} can't be read ({cause}). If nobody uses it, delete "
        "the rows of that name"
    )


def standing_of(answer: PGresult, row: int) -> LockInfo:
    """A row of name, capacity, holders and waiters, the last two as JSON. Raises ``ValueError``
    for what no version has written; a label that can't be read has question marks."""
    name, capacity, holders, waiters = (answer.get_value(row, column) for column in range(4))
    try:
        return LockInfo(
            (name or b"").decode(),
            whole(int(capacity or 0), MOST_SLOTS),
            tuple(_holder(*values) for values in json.loads(holders or b"[]")),
            tuple(_waiter(*values) for values in json.loads(waiters or b"[]")),
        )
    except (TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def standing_or_notice(answer: PGresult, row: int) -> LockInfo:
    """The same; for what can't be read, the name and a notice that says so."""
    try:
        return standing_of(answer, row)
    except ValueError as error:
        name = (answer.get_value(row, 0) or b"").decode(errors="replace")
        text = f"what is stored under this name can't be read: {error}"
        return LockInfo(name, 0, (), (), notice=text)


def _holder(
    label: object, mode: object, token: object, slots: object, since: object, remaining: object
) -> Holder:
    if slots is not None and (not isinstance(slots, list) or len(slots) > MOST_SLOTS):
        raise ValueError("slots are no list")
    held = tuple(whole(slot, MOST_SLOTS) for slot in slots or ())
    times = finite(since), finite(remaining)
    return Holder(*_label(label), Mode(str(mode)), whole(token), held, *times)


def _waiter(label: object, mode: object, since: object, behind: object) -> Waiter:
    return Waiter(*_label(label), Mode(str(mode)), finite(since), whole(behind))


def _label(label: object) -> tuple[str, int, str, str]:
    return read_label(label if isinstance(label, str) else "")


def whole(value: object, largest: int = LARGEST_TOKEN) -> int:
    """The value if it is a number that can be stored: not below 0, nor above the largest."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise ValueError(f"{str(value)[:40]!r} is no number from 0 to {largest}")
    return value


def finite(value: object) -> float:
    """The value if it is a time: a number that is not infinite."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is no time")
    return value


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
