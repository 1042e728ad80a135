"""The thread on which ``on_lost`` of blocking clients calls back: one per process.

A slow callback makes other callbacks wait, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core import log
from holdfast.io import lifetime
from holdfast.io.one_thread import OneThread

try:
    from _queue import SimpleQueue
except ImportError:
    from queue import SimpleQueue

__all__ = ["callbacks"]

Callback = Callable[[str], object]


class _Callbacks:
    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callback, str]] = SimpleQueue()
        self._one = OneThread("holdfast-callbacks", self._run)
        self.prepare = self._one.start
        """For whoever wants to be called back: if no thread can be started, it learns it now."""

    def call(self, callback: Callback, reason: str) -> None:
        """Has it called, in order, by the thread that ``prepare`` started; never waits."""
        self._queue.put((callback, reason))

    def _run(self) -> None:
        while True:
            callback, reason = self._queue.get()
            try:
                callback(reason)
            except BaseException:  # noqa: BLE001 - the others are called, whatever one does
                log.exception("a callback of on_lost failed")
            del callback  # what it refers to is not kept until the next one comes

    def forked(self) -> None:
        self._queue = SimpleQueue()
        self._one.forked()


callbacks = _Callbacks()
lifetime.at_fork(callbacks)
