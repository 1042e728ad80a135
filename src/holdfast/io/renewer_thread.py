"""The renewer's thread: one per client, started by the first hold or wait, ended with the
client."""

from __future__ import annotations

import threading

from holdfast.core.contract import Store
from holdfast.core.drive import run_now
from holdfast.core.renewer import Renewer
from holdfast.io import lifetime
from holdfast.io.one_thread import OneThread
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.io.watcher import watcher

__all__ = ["RenewerThread"]


class RenewerThread:
    """Runs a ``Renewer`` over blocking wires, whatever the client's own world is."""

    def __init__(self, store: Store) -> None:
        runtime = BlockingRuntime()
        self.renewer = Renewer(runtime, store.backend(runtime), store.display)
        self.renewer.start = self.start
        self._one = OneThread("holdfast-renewer", self._run)
        self._starting = threading.RLock()

    def running(self) -> bool:
        """Whether the thread was started, and has not been forked away."""
        return self._one.thread is not None

    def start(self) -> None:
        """Makes sure that the thread runs; cheap when it does."""
        if self.running() or self.renewer.closing:
            return
        with self._starting:
            if self.running():  # another thread was faster
                return
            watcher.watch(self.renewer)
            lifetime.at_exit(self)
            try:
                self._one.start()
            except RuntimeError:  # no more threads
                self._ended()
                raise

    def _run(self) -> None:
        run_now(self.renewer.run())
        run_now(self.renewer.finish())
        run_now(self.renewer.backend.close())
        self._ended()

    def _ended(self) -> None:
        watcher.leave(self.renewer)
        lifetime.ended(self)

    def end(self, seconds: float | None) -> None:
        """Releases all that is held and ends the thread, within so many seconds."""
        self.renewer.closing = True
        thread = self._one.thread
        if thread is None:  # it was never needed, or could not be started
            run_now(self.renewer.finish())
            run_now(self.renewer.backend.close())
            self._ended()
            return
        self.renewer.signal.set()
        if threading.current_thread() is not thread:
            thread.join(seconds)

    def forked(self) -> None:
        """In a forked child: the thread is the parent's; the next hold starts another."""
        self._one.forked()
        self._starting = threading.RLock()
        self.renewer.forked()
