"""The threads of the process: renewers, the watcher of ends, callbacks.

One renewer per client renews what is held. One watcher per process reports holds that become
doubtful or lost. One thread per process calls ``on_lost`` callbacks of blocking clients. All are
daemon threads, started when they are first needed and started again after a fork.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from holdfast.core import log
from holdfast.core.contract import Backend, Store
from holdfast.core.drive import run_now
from holdfast.core.renewer import Renewer
from holdfast.core.watcher import EndWatcher
from holdfast.io import lifetime
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime

__all__ = ["OneThread", "RenewerThread", "callbacks", "watcher"]

Callback = Callable[[str], object]


class OneThread:
    """A daemon thread that exists at most once, even if an interrupt stops its start half-way.

    Started when it is first needed, and again after a fork.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._name, self._target = name, run
        self._threads: list[threading.Thread] = []
        """The first one works. Appending is atomic: of two threads one is the first."""
        self._starting = threading.RLock()

    @property
    def thread(self) -> threading.Thread | None:
        """The thread, if it was started in this process."""
        return self._threads[0] if self._threads else None

    def start(self) -> None:
        """Starts the thread unless it runs, which is a cheap check. Raises ``RuntimeError`` if the
        system allows no more threads."""
        if self._threads:
            return
        with self._starting:
            if self._threads:  # another thread has just started it
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        # A start that an interrupt stopped half-way may have started its thread, and then the next
        # start starts another one: the first thread works, the second returns.
        thread = threading.current_thread()
        self._threads.append(thread)
        if self._threads[0] is thread:
            self._target()

    def forked(self) -> None:
        """In a forked child: the thread exists in the parent only."""
        self._threads = []
        self._starting = threading.RLock()


class _Callbacks:
    """Calls ``on_lost`` callbacks. A slow callback delays other callbacks, and nothing else."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callback, str]] = queue.SimpleQueue()
        self._one = OneThread("holdfast-callbacks", self._run)
        self.prepare = self._one.start
        """Call before registering a callback: raises ``RuntimeError`` if no thread can be
        started."""

    def call(self, callback: Callback, reason: str) -> None:
        """Queues a callback for the thread that ``prepare`` started; never waits."""
        self._queue.put((callback, reason))

    def _run(self) -> None:
        while True:
            callback, reason = self._queue.get()
            try:
                callback(reason)
            except BaseException:  # noqa: BLE001 - the next callbacks must run
                log.exception("a callback of on_lost failed")
            del callback  # so that its objects are not kept until the next callback

    def forked(self) -> None:
        self._queue = queue.SimpleQueue()
        self._one.forked()


callbacks = _Callbacks()
lifetime.at_fork(callbacks)


class _Watcher(EndWatcher):
    """The watcher on its thread. A hold is not taken if the thread can't be started: its end would
    not be reported in time."""

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


class RenewerThread:
    """Runs the ``Renewer`` of a client on a thread, over blocking I/O, also for an asyncio client.

    Started by the first hold or wait, ended with the client.
    """

    def __init__(self, store: Store) -> None:
        runtime = BlockingRuntime()
        backend = store.backend(runtime)
        self.renewer = Renewer(runtime, backend, store.display, sessions=store.whole_seconds)
        self.renewer.start = self.start
        self._one = OneThread("holdfast-renewer", self._run)
        self._starting = threading.RLock()
        self.backends: list[Backend] = [backend]
        """What is closed at the end: the renewer's backend, and that of a blocking client."""

    def running(self) -> bool:
        """Whether the thread was started in this process."""
        return self._one.thread is not None

    def start(self) -> None:
        """Starts the thread unless it runs, which is a cheap check."""
        if self.running() or self.renewer.closing:
            return
        with self._starting:
            if self.running():  # another thread has just started it
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
        self._finish(background=True)

    def _finish(self, *, background: bool) -> None:
        run_now(self.renewer.finish(background=background))
        for backend in self.backends:
            run_now(backend.close())
        self._ended()

    def _ended(self) -> None:
        watcher.leave(self.renewer)
        lifetime.ended(self)

    def end(self, seconds: float | None) -> None:
        """Releases all holds, closes the backends and ends the thread; waits for that at most
        ``seconds``. ``None``: for as long as the store answers. On a store that hangs the thread
        ends later, by itself."""
        self.renewer.close()
        thread = self._one.thread
        if thread is None:  # it was not needed, or could not be started
            self._finish(background=False)
        elif threading.current_thread() is not thread:
            if seconds is not None:
                thread.join(seconds)
                return
            while thread.is_alive() and (left := self.renewer.finish_by - now()) > 0:
                thread.join(left)
            lifetime.ended(self)  # the exit of the process does not wait for it again

    def forked(self) -> None:
        """In a forked child: the thread exists in the parent only; the next hold starts another."""
        self._one.forked()
        self._starting = threading.RLock()
        self.renewer.forked()
