"""Reading the server's replies: attempts, locks and their holders, records, settings.

Stored values may be damaged: a value that no version of Holdfast writes raises ``Incompatible``,
since a retry would not help.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

from psycopg.pq.abc import PGresult

from holdfast.claim import (
    Busy,
    Claim,
    Grant,
    Holder,
    LockInfo,
    Mode,
    Record,
    Waiter,
    read_holds,
    read_label,
)
from holdfast.core.admit import check_limit
from holdfast.core.contract import QUEUE_CAP, Finding, Page
from holdfast.errors import HoldfastError, Incompatible, LimitMismatch
from holdfast.stores.postgres.connection import PostgresRefused

__all__ = [
    "LARGEST_TOKEN",
    "as_error",
    "findings",
    "numbers",
    "read_attempt",
    "read_look",
    "read_record",
    "read_survey",
]

LARGEST_TOKEN = 2**63 - 1
MOST_SLOTS = 65536
QUEUE_FULL_SECONDS = 1.0
"""When to try again if the queue is full."""


def read_attempt(claim: Claim, reply: bytes, store: str) -> Grant | Busy:
    """Reads 'G token slots', 'B place seconds last-token', 'F place', 'M capacity' or 'D'. Raises
    ``LimitMismatch`` for an 'M', and ``Incompatible`` for a damaged row ('D')."""
    try:
        return _read_attempt(claim, reply, store)
    except LimitMismatch:
        raise
    except ValueError as error:
        raise _damaged(claim.name, store, error) from None


def _read_attempt(claim: Claim, reply: bytes, store: str) -> Grant | Busy:
    if reply == b"D":
        raise ValueError("a holder in its row is damaged")
    kind, number, rest, *last = reply.split(b" ")
    if kind == b"G":
        return Grant(claim, int(number), tuple(numbers(rest)) if rest else ())
    if kind == b"B":
        seconds = max(0.0, float(rest)) if rest else None
        return Busy(int(number), seconds, int(last[0]) if last else None)
    if kind == b"F":
        reason = f"{QUEUE_CAP} already wait for {claim.name!r}"
        return Busy(int(number), QUEUE_FULL_SECONDS, reason=reason)
    capacity = int(number)
    check_limit(claim, capacity, slots=capacity > 0, store=store)
    raise ValueError(f"its limit is {capacity}")


def numbers(text: bytes) -> list[int]:
    """Reads numbers with commas between them."""
    return [int(number) for number in text.split(b",")] if text else []


def as_error(name: str, store: str, error: PostgresRefused) -> HoldfastError:
    """Returns the error for a request about one name that the server refused. A data exception
    (class 22) means that a stored value is damaged."""
    return _damaged(name, store, error) if error.sqlstate[:2] == "22" else error


def _damaged(name: str, store: str, cause: object) -> Incompatible:
    return Incompatible(
        f"what {store} has stored for {name!r} can't be read ({cause}). If no client uses it, "
        "delete the rows of that name"
    )


def read_look(answer: PGresult, name: str, store: str) -> LockInfo:
    """Reads the row of one name; an empty ``LockInfo`` if there is none."""
    try:
        return _lock_info(answer, 0) if answer.ntuples else LockInfo(name, 0, (), ())
    except ValueError as error:
        raise _damaged(name, store, error) from None


def read_survey(answer: PGresult, limit: int) -> Page:
    """Reads a page of at most ``limit`` rows, without the names that are not in use."""
    infos = [_lock_info_or_notice(answer, row) for row in range(answer.ntuples)]
    used = [info for info in infos if info.holders or info.waiters or info.notice]
    return Page(used, infos[-1].name if len(infos) == limit else None)


def _lock_info(answer: PGresult, row: int) -> LockInfo:
    """Reads a row of name, capacity, holders and waiters, the last two as JSON. Raises
    ``ValueError`` for damaged values. An unreadable label becomes question marks."""
    name, capacity, holders, waiters = (answer.get_value(row, column) for column in range(4))
    try:
        return LockInfo(
            (name or b"").decode(),
            _whole(int(capacity or 0), MOST_SLOTS),
            tuple(_holder(*values) for values in json.loads(holders or b"[]")),
            tuple(_waiter(*values) for values in json.loads(waiters or b"[]")),
        )
    except (TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _lock_info_or_notice(answer: PGresult, row: int) -> LockInfo:
    """Reads a row; a damaged one becomes its name with a notice."""
    try:
        return _lock_info(answer, row)
    except ValueError as error:
        name = (answer.get_value(row, 0) or b"").decode(errors="replace")
        text = f"what is stored under this name can't be read: {error}"
        return LockInfo(name, 0, (), (), notice=text)


def _holder(
    label: object, mode: object, token: object, slots: object, since: object, remaining: object
) -> Holder:
    if slots is not None and (not isinstance(slots, list) or len(slots) > MOST_SLOTS):
        raise ValueError("slots are no list")
    held = tuple(_whole(slot, MOST_SLOTS) for slot in slots or ())
    times = _finite(since), _finite(remaining)
    return Holder(*read_label(_text(label)), Mode(str(mode)), _whole(token), held, *times)


def _waiter(label: object, mode: object, since: object, behind: object) -> Waiter:
    text, began = _text(label), _finite(since)
    return Waiter(*read_label(text), Mode(str(mode)), began, _whole(behind), read_holds(text))


def _text(label: object) -> str:
    return label if isinstance(label, str) else ""


def _whole(value: object, largest: int = LARGEST_TOKEN) -> int:
    """Returns the value if it is an int from 0 to ``largest``; else raises ``ValueError``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise ValueError(f"{str(value)[:40]!r} is no number from 0 to {largest}")
    return value


def _finite(value: object) -> float:
    """Returns the value if it is a finite number; else raises ``ValueError``."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is no time")
    return value


def read_record(answer: PGresult, name: str, store: str) -> Record | None:
    """Reads the record of a name; None if there is none."""
    if not answer.ntuples:
        return None
    text, token, age = (answer.get_value(0, column) or b"" for column in range(3))
    try:
        return Record(text.decode(), _whole(int(token)), _finite(float(age)))
    except ValueError as error:
        raise _damaged(name, store, error) from None


LONG_TRANSACTION_SECONDS = 60.0
"""``check()`` warns of a transaction that has a snapshot for longer."""


def findings(seen: dict[str, Any], waiting: Finding) -> list[Finding]:
    """Judges the server's settings that the guarantees depend on (``connect.examine``)."""
    return [
        Finding("server", f"PostgreSQL {seen['version']}, as {seen['role']}"),
        _durability(seen),
        _replication(seen),
        _privacy(seen),
        _schema(seen),
        _transactions(seen),
        waiting,
    ]


def _durability(seen: dict[str, Any]) -> Finding:
    if seen["fsync"] != "on":
        text = "fsync is off: a crash of the server's machine may undo grants"
        return Finding("durability", text, "warning")
    return Finding("durability", "grants are on disk before a client learns of them")


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
            "every role may create functions in Holdfast's schema, which could then run in place "
            "of Holdfast's own: REVOKE CREATE ON SCHEMA … FROM PUBLIC"
        )
        return Finding("schema", text, "warning")
    return Finding("schema", "functions look nothing up by the caller's search_path")


def _transactions(seen: dict[str, Any]) -> Finding:
    """An open snapshot keeps every version of a row: two of each hold."""
    oldest = seen["oldest"] or 0.0
    slows = "old versions of rows stay until then, and requests for a busy name get slower"
    if oldest > LONG_TRANSACTION_SECONDS:
        text = f"one has been open for {oldest:.0f} s: {slows} (pg_stat_activity.backend_xmin)"
        return Finding("transactions", text, "warning")
    if seen["slots"]:
        text = f"a replication slot is far behind: {slows} (pg_replication_slots.xmin)"
        return Finding("transactions", text, "warning")
    unseen = "" if seen["sees_all"] else ", as far as this role sees (GRANT pg_read_all_stats)"
    return Finding("transactions", f"none with a snapshot is long open{unseen}")
