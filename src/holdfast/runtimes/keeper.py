"""The keeper's thread: one per door, started by the first hold or wait, ended with the door."""

from __future__ import annotations

import threading

from holdfast.core.contract import Store
from holdfast.core.drive import run_now
from holdfast.core.keep import Keep
from holdfast.runtimes import lifetime
from holdfast.runtimes.blocking import BlockingRuntime

__all__ = ["KeeperThread"]


class KeeperThread:
    """Runs a ``Keep`` over blocking wires, whatever the door's own world is."""

    def __init__(self, store: Store) -> None:
        runtime = BlockingRuntime()
        self.keep = Keep(runtime, store.backend(runtime), store.display)
        self.keep.start = self.start
        self._threads: list[threading.Thread] = []
        """The keeper, at its head. Appending is atomic: of two threads one is the first."""
        self._starting = threading.RLock()

    def running(self) -> bool:
        """Whether the thread was started, and has not been forked away."""
        return bool(self._threads)

    def start(self) -> None:
        """Makes sure that the thread runs; cheap when it does."""
        if self.running() or self.keep.closing:
            return
        with self._starting:
            if self.running():  # another thread was faster
                return
            thread = threading.Thread(target=self._run, name="holdfast-keeper", daemon=True)
            lifetime.at_exit(self)
            try:
                thread.start()
            except RuntimeError:  # no more threads
                lifetime.ended(self)
                raise
            self._threads.append(thread)

    def _run(self) -> None:
        # A start that an interrupt tore apart may have started its thread nevertheless, and then
        # the next start another: whoever comes first keeps, and two never do.
        thread = threading.current_thread()
        self._threads.append(thread)
        if self._threads[0] is not thread:
            return
        run_now(self.keep.run())
        run_now(self.keep.finish())
        run_now(self.keep.backend.close())
        lifetime.ended(self)

    def end(self, seconds: float | None) -> None:
        """Releases all that is held and ends the thread, within so many seconds."""
        self.keep.closing = True
        if not self._threads:  # it was never needed, or could not be started
            run_now(self.keep.finish())
            run_now(self.keep.backend.close())
            lifetime.ended(self)
            return
        self.keep.signal.set()
        thread = self._threads[0]
        if threading.current_thread() is not thread:
            thread.join(seconds)

    def forked(self) -> None:
        """In a forked child: the thread is the parent's; the next hold starts another."""
        self._threads = []
        self._starting = threading.RLock()
        self.keep.signal = self.keep.runtime.signal()
        self.keep.planned = float("inf")
