"""A thread's wait for one of two things: that a socket has something to read, or a call.

Making the pair of sockets that carries a call costs more than the wait itself, so they are kept.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress

from holdfast.io.clock import now

__all__ = ["Waker", "Wakers"]

LONGEST_WAIT_SECONDS = 3600.0


class Waker:
    """What one thread waits with."""

    __slots__ = ("_inside", "_outside", "_poll")

    def __init__(self) -> None:
        self._inside, self._outside = socket.socketpair()
        self._inside.setblocking(False)
        self._outside.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._inside, select.POLLIN)

    def call(self) -> None:
        """Ends the wait, or the next one. From any thread."""
        with suppress(OSError):  # full of calls already, or closed
            self._outside.send(b"x")

    def wait(self, fileno: int, until: float) -> None:
        """Returns when there is something to read, at a call, or then; maybe early."""
        self._poll.register(fileno, select.POLLIN)
        try:
            seconds = max(0.0, min(until - now(), LONGEST_WAIT_SECONDS))
            ready = self._poll.poll(seconds * 1000 + 1)
        finally:
            self._poll.unregister(fileno)
        for found, _ in ready:
            if found != fileno:
                with suppress(BlockingIOError):
                    self._inside.recv(4096)

    def close(self) -> None:
        self._inside.close()
        self._outside.close()


class Wakers:
    """Those that nobody uses: a stack without a lock."""

    def __init__(self) -> None:
        self._spare: list[Waker] = []
        self._closed = False

    def borrow(self) -> Waker:
        try:
            return self._spare.pop()
        except IndexError:
            return Waker()

    def give_back(self, waker: Waker) -> None:
        self._spare.append(waker)
        if self._closed:
            self.close()

    def forget(self) -> None:
        """In a forked child: a call through them would reach the parent."""
        spare, self._spare = self._spare, []
        for waker in spare:
            waker.close()

    def close(self) -> None:
        self._closed = True
        while self._spare:
            with suppress(IndexError):  # another thread was faster
                self._spare.pop().close()
