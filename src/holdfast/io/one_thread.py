"""A daemon thread of which there is never a second, however its start is torn apart."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["OneThread"]


class OneThread:
    """Started when it is first needed; started anew after a fork."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._name, self._target = name, run
        self._threads: list[threading.Thread] = []
        """The one at work, at its head. Appending is atomic: of two threads one is the first."""
        self._starting = threading.RLock()

    @property
    def thread(self) -> threading.Thread | None:
        """The thread, if it was started and has not been forked away."""
        return self._threads[0] if self._threads else None

    def start(self) -> None:
        """Makes sure that the thread runs; cheap when it does. Raises ``RuntimeError`` if the
        system allows no more threads."""
        if self._threads:
            return
        with self._starting:
            if self._threads:  # another thread was faster
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        # A start that an interrupt tore apart may have started its thread nevertheless, and then
        # the next start another: whoever comes first works, and two never do.
        thread = threading.current_thread()
        self._threads.append(thread)
        if self._threads[0] is thread:
            self._target()

    def forked(self) -> None:
        """In a forked child: the thread is the parent's."""
        self._threads = []
        self._starting = threading.RLock()
