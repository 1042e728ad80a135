"""The watcher's thread: one per process, started by its first hold, for all clients of it.

A hold whose watcher can't be started is not taken: nobody would tell of its end in time.
"""

from __future__ import annotations

from holdfast.core.drive import run_now
from holdfast.core.watch import Watch
from holdfast.io import lifetime
from holdfast.io.one_thread import OneThread
from holdfast.io.runtime_blocking import BlockingRuntime

__all__ = ["watcher"]


class _Watcher(Watch):
    def __init__(self) -> None:
        super().__init__(BlockingRuntime())
        self._one = OneThread("holdfast-watcher", self._run)
        self.start = self._one.start

    def _run(self) -> None:
        run_now(self.run())

    def forked(self) -> None:
        super().forked()
        self._one.forked()


watcher = _Watcher()
lifetime.at_fork(watcher)
