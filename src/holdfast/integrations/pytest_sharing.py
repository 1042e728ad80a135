"""Values that are set up once and torn down once for all xdist workers of a test run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast import Lease, Locks

__all__ = ["Sharing", "noting"]

KEEP_SECONDS = 24 * 3600.0
"""How long the values of a run are kept if it is killed before it tears down."""


class Sharing:
    """The part of one worker in the fixtures that all workers of its run share.

    It holds a read lock until its session ends, and then asks for the write lock: the first to get
    that is the last to leave. A worker that is killed loses its read lock after a ttl."""

    def __init__(
        self, locks: Locks, run: str, teardowns: Mapping[str, Callable[[Any], object]]
    ) -> None:
        self._locks, self._run, self._teardowns = locks, run, teardowns
        self._users = locks.rwlock(f"{run}/users")
        self._lease: Lease | None = self._users.read().acquire()

    def _job(self, key: str) -> Any:
        return self._locks.once(f"{self._run}/{key}", keep=KEEP_SECONDS)

    def value(self, key: str, setup: Callable[[], Any]) -> Any:
        """What the set-up returned, in this worker or in another one."""
        return self._job(key).run(setup).result()

    def leave(self, failures: list[str]) -> None:
        """Waits until no worker uses the fixtures, and tears down those that are still there. Adds
        what fails: each is torn down once, unless its worker is killed meanwhile."""
        if self._lease is not None:
            self._lease.release()
        with self._users.write():
            made = [(key, self._job(key).outcome()) for key in self._teardowns]
            found = [(key, outcome) for key, outcome in made if outcome is not None]
            for key, outcome in sorted(found, key=lambda one: one[1].age_seconds):  # youngest first
                with noting(failures):
                    self._teardowns[key](outcome.value)
                self._job(key).forget()


@contextmanager
def noting(failures: list[str]) -> Iterator[None]:
    """Notes an exception: one that a hook of an xdist worker raises at its end is not shown."""
    try:
        yield
    except Exception:  # noqa: BLE001 - shown at the end of the run, which fails
        failures.append(traceback.format_exc())
