"""Transactions of Django: the guard in one, and the release of a lock after its end."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from holdfast import Lease, Unsupported, fencing
from holdfast.integrations.django import settings

__all__ = [
    "ReleasedBeforeCommit",
    "guard",
    "is_open",
    "is_uncommitted",
    "refuse_manual",
    "release_after",
    "warn",
]

STACK_LEVEL = 5
"""Of a warning: from ``warn`` through a generator and two context managers to the block."""

_log = logging.getLogger("holdfast.integrations.django")


class ReleasedBeforeCommit(UserWarning):
    """A lock was released while the transaction around it was still open: the next holder reads
    what was there before this transaction."""


def guard(
    lease: Any,
    *,
    resource: str | None = None,
    using: str | None = None,
    savepoint: bool = False,
    table: str = fencing.sql.TABLE,
) -> None:
    """Lets the lease's fence enter the resource in the current transaction, or raises
    ``StaleFence``. Call it in ``atomic()``, before the first query.

    The connection is Django's own, of the database ``using``: PostgreSQL (psycopg 3), SQLite, or
    MySQL by PyMySQL. The resource is called as the lock is, unless ``resource`` is given. Raises
    ``TransactionManagementError`` outside ``atomic()``, and ``Unsupported`` in an inner
    ``atomic()``, whose rollback would take the fence back: ``savepoint=True`` allows that.
    """
    resource = resource or getattr(lease, "name", None)
    if resource is None:
        raise ValueError("guard(resource=…) is needed for a fence that is text")
    connection = connections[using or DEFAULT_DB_ALIAS]
    if not connection.in_atomic_block:
        raise TransactionManagementError(
            f"{resource!r} is guarded inside transaction.atomic(using={connection.alias!r}): "
            "without a transaction a stale holder could come between the guard and the writes"
        )
    if _in_savepoint(connection) and not savepoint:
        raise Unsupported(
            f"{resource!r} can't be guarded in an inner atomic(): a rollback of that block takes "
            "the fence back while the transaction goes on. Call guard() in the outermost one "
            "(ATOMIC_REQUESTS is one), before the inner one. savepoint=True allows it"
        )
    connection.ensure_connection()
    with connection.wrap_database_errors:
        fencing.sql.guard(
            connection.connection,
            resource,
            lease,
            table=table,
            savepoint=savepoint or _in_test_case(connection),
            fence_keys=settings.arguments().get("fence_keys", ()),
        )


def is_open(using: str | None = None) -> bool:
    """Whether this thread is in ``atomic()``: of one database, or of any."""
    return bool(_open(using))


def is_uncommitted(using: str | None = None) -> bool:
    """Whether this thread has a transaction open: by ``atomic()``, or with autocommit off."""
    manual = [c for c in _connections(using) if _is_manual(c) and not c.closed_in_transaction]
    return is_open(using) or any(_in_progress(c.connection) for c in manual)


def refuse_manual(using: str | None) -> None:
    """Raises ``TransactionManagementError`` if a database has autocommit off: Django tells nobody
    of the commits there. One that is not connected yet has what its settings say."""
    aliases = list(connections) if using is None else [connections[using].alias]
    known = {c.alias: _is_manual(c) for c in connections.all(initialized_only=True)}
    for alias in aliases:
        if known.get(alias, not connections.settings[alias]["AUTOCOMMIT"]):
            raise TransactionManagementError(
                f'until="commit" can\'t see the commits of the database {alias!r}, which has '
                "autocommit off. Take the lock without it, and commit inside the block; or name "
                "the database that counts by using="
            )


def warn(name: str) -> None:
    """Warns that a lock is released before its transaction commits. The text is the same for all
    rows of a model, so that Python shows it once for each line of code."""
    warnings.warn(
        f"a lock {name.partition(':')[0]!r} is released inside a transaction: the next holder "
        "reads what was there before this transaction commits. Take it around atomic(), or with "
        'until="commit" (with ATOMIC_REQUESTS every view is inside atomic()). With autocommit off, '
        "commit inside the block",
        ReleasedBeforeCommit,
        stacklevel=STACK_LEVEL,
    )


def release_after(lease: Lease, using: str | None) -> None:
    """Releases the lock when the transactions that are open now have ended."""
    _ReleaseAtEnd(lease, using).wait(_open(using)[0])


class _ReleaseAtEnd:
    """A lock to release when a transaction has ended.

    Django has a hook for commits only. On a rollback it drops the functions that wait for the
    commit; nothing else refers to this object, so that it is deleted at that moment.
    """

    def __init__(self, lease: Lease, using: str | None) -> None:
        self._lease, self._using = lease, using
        self._waits_for: BaseDatabaseWrapper | None = None
        self._depth = 0

    def wait(self, connection: BaseDatabaseWrapper) -> None:
        self._waits_for, self._depth = connection, len(connection.savepoint_ids)
        connection.on_commit(self._committed, robust=True)
        if not _in_test_case(connection):  # it takes those behind the number that it has seen
            # The first one: if another function fails, Django does not call those behind it, and
            # the traceback keeps them.
            waiting = connection.run_on_commit
            waiting.insert(0, waiting.pop())

    def _committed(self) -> None:
        """A transaction has been committed; those of other databases may still be open."""
        ended, self._waits_for = self._waits_for, None
        self.settle([c for c in _open(self._using) if c is not ended])

    def __del__(self) -> None:
        connection, self._waits_for = self._waits_for, None
        if connection is None:
            return
        closed = connection.in_atomic_block and len(connection.savepoint_ids) == self._depth
        after = _ReleaseAtEnd(self._lease, self._using)
        # Rolled back, perhaps to a savepoint only. One that is closed can't commit any more.
        after.settle([c for c in _open(self._using) if not (closed and c is connection)])

    def settle(self, still_open: list[BaseDatabaseWrapper]) -> None:
        """Releases, or waits for the next transaction."""
        if still_open:
            self.wait(still_open[0])
            return
        if self._lease.lost:
            reason = self._lease.reason
            _log.warning("%r was lost before its transaction ended: %s", self._lease.name, reason)
        self._lease.release()


def _open(using: str | None) -> list[BaseDatabaseWrapper]:
    """The connections of this thread with a transaction of the program that ``atomic()`` ends."""
    return [c for c in _connections(using) if _blocks(c) and not _is_manual(c)]


def _connections(using: str | None) -> list[BaseDatabaseWrapper]:
    found = connections.all(initialized_only=True)
    return [c for c in found if using in (None, c.alias)]


def _is_manual(connection: BaseDatabaseWrapper) -> bool:
    """Whether autocommit is off, so that the program commits by itself; ``atomic()`` makes
    savepoints there. Does not connect."""
    if connection.in_atomic_block:
        return not connection.commit_on_exit
    if connection.connection is None:
        return not connection.settings_dict["AUTOCOMMIT"]
    return not connection.autocommit


def _in_progress(connection: Any) -> bool:
    """Whether a driver's connection is in a transaction. Those of MySQL can't tell: ``True``."""
    status = getattr(getattr(connection, "info", None), "transaction_status", None)
    if status is not None:
        return int(status) != 0  # libpq's PQTRANS_IDLE
    return bool(getattr(connection, "in_transaction", connection is not None))


def _blocks(connection: BaseDatabaseWrapper) -> list[str | None]:
    """The savepoints of the ``atomic()`` blocks that are open, from the outermost; ``None`` where a
    block has none. Those that Django's ``TestCase`` has opened do not count."""
    blocks = connection.atomic_blocks
    missing = len(blocks) - len(connection.savepoint_ids)  # the outermost has none
    savepoints = [*[None] * missing, *connection.savepoint_ids]
    pairs = zip(blocks, savepoints, strict=False)
    return [savepoint for block, savepoint in pairs if not _of_test_case(block)]


def _in_savepoint(connection: BaseDatabaseWrapper) -> bool:
    return any(savepoint is not None for savepoint in _blocks(connection)[1:])


def _in_test_case(connection: BaseDatabaseWrapper) -> bool:
    return any(_of_test_case(block) for block in connection.atomic_blocks)


def _of_test_case(block: object) -> bool:
    # Private: tests/shape/test_private_parts.py sees that it is there.
    return bool(getattr(block, "_from_testcase", False))
