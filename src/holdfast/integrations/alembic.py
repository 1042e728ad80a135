"""Alembic under a lock: one process migrates, the others wait for it and find nothing to do.

    # env.py
    from holdfast.integrations.alembic import locked

    with connectable.connect() as connection:
        context.configure(connection=connection, target_metadata=target_metadata)
        with locked("redis://cache"), context.begin_transaction():
            context.run_migrations()

The revision is read before the lock is taken: a database at its head needs none. It is read on the
migrating connection, in a transaction that ends at once, so that a process that waits has none
open: ``CREATE INDEX CONCURRENTLY`` of the process that migrates does not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import holdfast
from holdfast import HoldfastError, Lease, Locks
from holdfast.integrations import missing_extra

try:
    from alembic import context
    from alembic.runtime.migration import MigrationContext
except ModuleNotFoundError as error:
    raise missing_extra(error, "alembic") from None

__all__ = ["locked"]

_held: ContextVar[dict[str, Lease]] = ContextVar("holdfast_alembic", default={})  # noqa: B039


@contextmanager
def locked(
    locks: Locks | str | None = None,
    *,
    name: str | None = None,
    timeout: float | None = None,
    **options: Any,
) -> Iterator[Lease | None]:
    """Holds a lock while a database is migrated; gives its lease, or ``None`` if none is needed.

    In ``env.py`` it stands between ``context.configure()`` and ``context.begin_transaction()``. No
    lock is taken for commands that change nothing, for ``--sql``, or if the database is at the
    revision that is asked for. A migration raises ``LockLost`` at its end if the lock is lost by
    then: where DDL is transactional, it is rolled back.

    Elsewhere it needs a ``name``, and is a lock around whatever migrates. One inside the other in
    the same thread, with the same name, is one lock.

    ``locks`` is a client or a URL, by default that of ``HOLDFAST_URL``. It waits until the lock is
    free, or raises ``LockTimeout`` after ``timeout`` seconds. Takes the options of ``Locks.lock``.
    """
    migration = _migration() if name is None else None
    if migration is not None and not _changes(migration):
        yield None
        return
    if migration is not None and not _may_be_pending(migration):
        _after_each_step(migration, None)
        yield None
        return
    name = name or _name_of(migration)
    with _lease_of(locks, name, {**options, "timeout": timeout}) as lease:
        if migration is not None:
            _after_each_step(migration, lease)
        yield lease


@contextmanager
def _lease_of(locks: Locks | str | None, name: str, options: dict[str, Any]) -> Iterator[Lease]:
    outer = _held.get()
    if name in outer:  # in the caller of the command, and in env.py
        yield outer[name]
        return
    with ExitStack() as stack:
        client = locks
        if not isinstance(client, Locks):
            client = stack.enter_context(holdfast.connect(locks))
        lease = stack.enter_context(client.lock(name, **options))
        before = _held.set({**outer, name: lease})
        stack.callback(_held.reset, before)
        yield lease


def _migration() -> MigrationContext:
    """The context that ``env.py`` has configured; raises ``RuntimeError`` if there is none."""
    try:
        return context.get_context()
    except Exception as error:  # Alembic raises Exception itself, or NameError
        raise RuntimeError(
            "locked() comes after context.configure() in env.py; elsewhere it needs a name="
        ) from error


def _changes(migration: MigrationContext) -> bool:
    """Whether the command changes the database: upgrade, downgrade or stamp, and not ``--sql``."""
    return "destination_rev" in migration.opts and not migration.as_sql


def _may_be_pending(migration: MigrationContext) -> bool:
    """Whether there may be something to do; leaves no transaction behind."""
    connection, wanted = migration.connection, migration.opts["destination_rev"]
    script = migration.script
    if connection is None or script is None or migration.purge or connection.in_transaction():
        return True  # what a transaction of the caller reads now, it might read again later
    try:
        present = migration.get_current_heads()
    finally:
        connection.rollback()
    heads = script.get_heads() if wanted in ("head", "heads") else [wanted]
    return not present or sorted(present) != sorted(heads)


def _after_each_step(migration: MigrationContext, lease: Lease | None) -> None:
    """Makes each migration raise if the lock is not held when it ends."""

    def check(**_: Any) -> None:
        if lease is None:
            raise HoldfastError(
                "the database was at the revision that is asked for, so no lock was taken; "
                "meanwhile another process has changed it. Run the command again"
            )
        lease.check()

    migration.on_version_apply_callbacks = (*migration.on_version_apply_callbacks, check)


def _name_of(migration: MigrationContext | None) -> str:
    """The same for all processes that migrate a database, however they spell its address."""
    assert migration is not None
    assert migration.connection is not None
    database = os.path.basename(migration.connection.engine.url.database or "")  # noqa: PTH119
    table = ".".join(filter(None, (migration.version_table_schema, migration.version_table)))
    return f"alembic:{database}:{table}"
