"""The threads of the process: renewers, the watcher of ends, callbacks, observers.

One renewer per client renews what is held. One watcher per process reports holds that become
doubtful or lost. One thread per process calls ``on_lost`` callbacks of blocking clients, and one
delivers events to observers. All are daemon threads, started when they are first needed and started
again after a fork.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from holdfast.core import log
from holdfast.core.contract import Backend, Runtime, Store
from holdfast.core.drive import run_now
from holdfast.core.renewer import Renewer
from holdfast.core.watcher import EndWatcher
from holdfast.io import lifetime
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime

__all__ = ["OneThread", "RenewerThread", "callbacks", "deliveries", "watcher"]

Callback = Callable[[Any], object]
MOST_DELIVERIES = 10_000
"""Of more events that wait for their observers, the newest are dropped, except ends of holds."""
DELIVERY_SECONDS = 0.25
"""How long the end of a client waits until observers were told of it."""


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
    """Calls callbacks on one thread. A slow callback delays other callbacks, and nothing else."""

    def __init__(self, thread: str, what: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Callback, Any]] = queue.SimpleQueue()
        self._what = what
        self._one = OneThread(thread, self._run)
        self.prepare = self._one.start
        """Call before registering a callback: raises ``RuntimeError`` if no thread can be
        started."""

    def call(self, callback: Callback, argument: Any) -> None:
        """Queues a callback for the thread that ``prepare`` started; never waits."""
        self._queue.put((callback, argument))

    def _run(self) -> None:
        while True:
            callback, argument = self._queue.get()
            try:
                callback(argument)
            except BaseException:  # noqa: BLE001 - the next callbacks must run
                log.exception("%s failed", self._what)
            del callback, argument  # so that its objects are not kept until the next callback

    def forked(self) -> None:
        self._queue = queue.SimpleQueue()
        self._one.forked()


callbacks = _Callbacks("holdfast-callbacks", "a callback of on_lost")
lifetime.at_fork(callbacks)


class _Deliveries(_Callbacks):
    """Delivers events to observers, from a bounded queue."""

    def __init__(self) -> None:
        super().__init__("holdfast-observers", "the delivery of an event")
        self.dropped = 0
        """How many events were dropped since the last log line about it."""
        self._delivered = 0
        self._stuck_at = -1
        """How many events were delivered when ``flush`` last waited in vain."""

    def call(self, callback: Callback, argument: Any, keep: bool = False) -> None:
        """Queues an event; drops it if too many wait, unless it is to be kept. Never waits, logs
        nothing and starts no thread: the watcher calls it."""
        if keep or self._queue.qsize() < MOST_DELIVERIES:
            super().call(self._deliver, (callback, argument))
        else:
            self.dropped += 1

    def _deliver(self, delivery: tuple[Callback, Any]) -> None:
        if self.dropped:
            dropped, self.dropped = self.dropped, 0
            log.warning("%d events were dropped: an observer is too slow", dropped)
        callback, argument = delivery
        try:
            callback(argument)
        finally:
            self._delivered += 1

    def flush(self, seconds: float) -> None:
        """Waits until what is queued now was delivered, for at most ``seconds``; not at all if the
        observer that the last flush waited for in vain has not returned since."""
        if self._one.thread is None or self._one.thread is threading.current_thread():
            return
        if self._delivered == self._stuck_at:
            return
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        super().call(done.put, None)
        try:
            done.get(timeout=seconds)
        except queue.Empty:
            if seconds >= DELIVERY_SECONDS:  # less, at the exit of the process, tells nothing
                self._stuck_at = self._delivered

    def forked(self) -> None:
        super().forked()
        self._stuck_at = -1


deliveries = _Deliveries()
lifetime.at_fork(deliveries)


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

    def __init__(self, store: Store, runtime: Runtime | None = None) -> None:
        runtime = runtime or BlockingRuntime()
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
            else:
                while thread.is_alive() and (left := self.renewer.finish_by - now()) > 0:
                    thread.join(left)
                lifetime.ended(self)  # the exit of the process does not wait for it again
        if self.renewer.events is not None:  # so that observers are told of the end
            deliveries.flush(
                DELIVERY_SECONDS if seconds is None else min(seconds, DELIVERY_SECONDS)
            )

    def forked(self) -> None:
        """In a forked child: the thread exists in the parent only; the next hold starts another."""
        self._one.forked()
        self._starting = threading.RLock()
        self.renewer.forked()
