"""Management commands of which one runs at a time, on all hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Literal

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from holdfast import BackendUnavailable, Lease, LockLost, LockTimeout
from holdfast.integrations.django.locks import locks

__all__ = ["LockedCommand", "held"]

UNAVAILABLE, BUSY, LOST, BAD_SETTING = 69, 75, 76, 78
"""Exit codes, the same as those of ``holdfast run``."""


@contextmanager
def held(name: str, **options: Any) -> Iterator[Lease]:
    """Holds a lock of the project in a command. Raises ``CommandError`` with an exit code if the
    lock is busy (75) or lost (76), its store can't be reached (69), or the settings are wrong."""
    with ExitStack() as stack:
        try:
            lease = stack.enter_context(locks.client.lock(name, **options))
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=BAD_SETTING) from error
        except LockTimeout as error:
            raise CommandError(str(error), returncode=BUSY) from error
        except BackendUnavailable as error:
            raise CommandError(str(error), returncode=UNAVAILABLE) from error
        try:
            with stack.pop_all():
                yield lease
        except LockLost as error:
            raise CommandError(str(error), returncode=LOST) from error


class LockedCommand(BaseCommand):
    """A management command that holds a lock while it runs: one at a time, on all hosts.

    A second one ends at once with a message that names the holder, and exit code 75. The lease is
    ``self.lease``; a long command calls ``self.lease.check()`` between its steps. It ends with code
    76 if the lock was lost, and 69 if the store can't be reached.
    """

    lock: ClassVar[str] = ""
    """The name, with fields of the command's options, as in ``"import:{feed}"``; by default
    ``command:`` and the command's name."""
    lock_timeout: ClassVar[float | None] = 0
    """How long it waits for the lock, in seconds; ``None`` for ever."""
    lock_options: ClassVar[dict[str, Any]] = {}
    """Options of ``holdfast.Locks.lock``: ``ttl``, ``max_hold``, ``note``."""
    busy: ClassVar[Literal["fail", "skip"]] = "fail"
    """What to do if it is busy: ``"skip"`` prints the message, and ends with exit code 0."""

    lease: Lease

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Runs the command under its lock. Raises ``CommandError``."""
        name = self._lock_name(options)
        with ExitStack() as stack:
            try:
                lock = held(name, timeout=self.lock_timeout, **self.lock_options)
                self.lease = stack.enter_context(lock)
            except CommandError as error:
                if self.busy != "skip" or error.returncode != BUSY:
                    raise
                self.stderr.write(f"skipped: {error}")
                return None
            return super().execute(*args, **options)

    def _lock_name(self, options: dict[str, Any]) -> str:
        template = self.lock or f"command:{type(self).__module__.rpartition('.')[2]}"
        try:
            return template.format_map(options)
        except (KeyError, IndexError, AttributeError) as error:
            raise CommandError(f"{template!r} has a field that is no option: {error}") from None
