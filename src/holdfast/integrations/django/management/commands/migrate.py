"""``manage.py migrate --lock``: Django's own command, by one process at a time, on all hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.core.management.commands import migrate
from django.db import connections
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder
from django.db.models.signals import pre_save

from holdfast import Lease
from holdfast.integrations.django.commands import BUSY, UNAVAILABLE, held

__all__ = ["Command"]


class Command(migrate.Command):
    """``migrate`` with the option ``--lock``; without it, Django's command as it is."""

    lease: Lease | None = None

    def add_arguments(self, parser: CommandParser) -> None:
        """Django's, and two of our own."""
        super().add_arguments(parser)
        parser.add_argument(
            "--lock",
            action="store_true",
            help="Migrate under a lock of this project's store: the first process migrates, the "
            "others wait for it and find nothing to do.",
        )
        parser.add_argument(
            "--lock-timeout",
            type=float,
            metavar="SECONDS",
            help="How long to wait for that lock; by default until it is free.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Migrates. Raises ``CommandError`` if the lock is busy for too long, or lost."""
        reads_only = options["plan"] or options["check_unapplied"]
        if not options.get("lock") or reads_only:
            super().handle(*args, **options)
        elif _may_be_pending(options):
            self._migrate(options["lock_timeout"], args, options)
        else:
            self._send_signals(args, options)

    def _send_signals(self, args: Any, options: dict[str, Any]) -> None:
        """Runs Django's command where nothing is pending: it sends ``post_migrate``, which makes
        what an earlier process that was killed did not come to. Waits for nothing."""
        try:
            self._migrate(0, args, options)
        except CommandError as error:
            if error.returncode not in (BUSY, UNAVAILABLE):
                raise
            self.stdout.write(f"No migrations to apply, and post_migrate is not sent: {error}")

    def _migrate(self, timeout: float | None, args: Any, options: dict[str, Any]) -> None:
        """Runs Django's command under the lock. It reads again what is applied."""
        lock = held(f"migrate:{options['database']}", timeout=timeout)
        with lock as self.lease, _rolled_back_if_lost(self.lease):
            super().handle(*args, **options)

    def migration_progress_callback(
        self, action: str, migration: Any = None, fake: bool = False
    ) -> None:
        """Called by Django around each migration: none begins once the lock is lost."""
        if self.lease is not None and action in ("apply_start", "unapply_start"):
            self.lease.check()
        super().migration_progress_callback(action, migration, fake)


@contextmanager
def _rolled_back_if_lost(lease: Lease) -> Iterator[None]:
    """Raises ``LockLost`` in the transaction of a migration, if it has one, when Django records it
    there as applied and the lock is lost by then."""

    def check(*, using: str, **_: Any) -> None:
        if connections[using].in_atomic_block:  # else what it did would stay without its record
            lease.check()

    pre_save.connect(check, sender=MigrationRecorder.Migration)
    try:
        yield
    finally:
        pre_save.disconnect(check, sender=MigrationRecorder.Migration)


def _may_be_pending(options: dict[str, Any]) -> bool:
    """Whether a migration may have to be applied, read without a lock. Only a plain ``migrate`` is
    looked at; with a target, an app or ``--run-syncdb`` it is true."""
    if options["app_label"] or options["run_syncdb"]:
        return True
    executor = MigrationExecutor(connections[options["database"]])
    return bool(executor.migration_plan(executor.loader.graph.leaf_nodes()))
