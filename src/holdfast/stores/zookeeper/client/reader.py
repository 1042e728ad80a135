"""Decides which thread reads ZooKeeper's replies: a thread that waits for one, or kazoo's thread.

A thread that is the only one to wait reads the socket itself: no other thread has to pass the reply
on. kazoo's thread leaves the socket to it for that time and a moment longer, since the next request
may follow soon. If several threads wait, or data arrives that kazoo must handle, kazoo's thread
reads for all.

The reader is the value of ``_reading[0]``. A thread that is interrupted gives up that role. kazoo's
thread takes the role from a thread that does not read because a signal handler occupies it. A
handler that waits for a reply itself, while its own thread was processing replies, ends the
connection: it can't go on in any other way before that thread does.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from holdfast.io.clock import now
from holdfast.stores.zookeeper.client.completion import LONGEST_WAIT_SECONDS, BlockingCompletion

__all__ = ["SharedReader", "is_held_by_this_thread"]

YIELD_SECONDS = 0.2
"""How long kazoo's thread leaves the socket alone after another thread has read from it."""
NEVER = float("-inf")
_KAZOO = object()


class SharedSocket(Protocol):
    def fileno(self) -> int: ...
    def shut(self) -> None: ...


def is_held_by_this_thread(lock: Any) -> bool:
    """Whether this thread holds the lock already: then the caller is a signal handler."""
    return bool(lock._is_owned())


def _nothing() -> bool:
    return False


class SharedReader:
    """The role of the reader of one session's connection, which one thread has at a time."""

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared and hasattr(select, "poll")
        """Whether waiting threads may read; else only kazoo's thread does."""
        self.read: Callable[[], bool] = _nothing
        """Processes the replies that have arrived; false if the rest is left to kazoo."""
        self.wake_kazoo: Callable[[], object] = _nothing
        """Wakes kazoo's thread, which then checks whether it must read."""
        self._reading: dict[int, object] = {}
        """The reader, under the key 0: taking the role is one atomic step."""
        self._waiting: dict[BlockingCompletion, None] = {}
        self._mutex = threading.RLock()
        """Held by a thread while it processes replies, and while it gives up the role."""
        self._socket: SharedSocket | None = None
        self._poll: Any = None
        self._last_read = NEVER
        self._missed: tuple[object, float] = (None, NEVER)
        self._missed_at = NEVER
        self._yielding = False
        self._wakeup_pair: tuple[socket.socket, socket.socket] | None = None
        self._wakeup_fd = -1

    # The connection, on kazoo's thread

    def attach(self, sock: SharedSocket) -> None:
        """Starts to read from a new connection."""
        if self.shared and self._wakeup_pair is None:
            self._wakeup_pair = socket.socketpair()
            for end in self._wakeup_pair:
                end.setblocking(False)
            self._wakeup_fd = self._wakeup_pair[0].fileno()
        self._make_poll(sock)
        self._socket = sock

    def _make_poll(self, sock: SharedSocket) -> None:
        # A new object each time: an interrupted thread may still use the old one.
        if self._wakeup_pair is not None:
            self._poll = select.poll()
            self._poll.register(sock.fileno(), select.POLLIN)
            self._poll.register(self._wakeup_fd, select.POLLIN)

    def detach(self) -> None:
        """Stops the reading by other threads. kazoo's thread then fails the pending requests."""
        with self._mutex:
            self._socket = None
        self._interrupt_poll()

    def close(self) -> None:
        pair, self._wakeup_pair, self._socket = self._wakeup_pair, None, None
        for end in pair or ():
            end.close()

    # The role of the reader, on kazoo's thread

    def yields(self) -> bool:
        """Whether kazoo's thread leaves the socket to others for now, until ``end_yield``."""
        if not self.shared and not self._reading:
            return False
        self._yielding = True  # before the check of the waiting threads: see wait()
        by_others = 0 in self._reading or not self._waiting
        last = max(self._last_read if self.shared else NEVER, self._missed_at)
        self._yielding = by_others and now() < last + YIELD_SECONDS
        return self._yielding

    def end_yield(self) -> None:
        self._yielding = False

    def acquire(self) -> bool:
        """Takes the role for kazoo's thread when data has arrived; false if another has it."""
        reader = self._reading.setdefault(0, _KAZOO)
        if reader is _KAZOO:
            return True
        missed = reader, self._last_read
        if missed == self._missed and self._take_over(reader):
            return True
        self._missed, self._missed_at = missed, now()
        return False

    def _take_over(self, reader: object) -> bool:
        """Takes the role from a thread that has not read for a while although it could."""
        if not self._mutex.acquire(blocking=False):
            return False  # it reads now
        try:
            if self._reading.get(0) is reader and self._socket is not None:
                self._make_poll(self._socket)
                self._reading[0] = _KAZOO
        finally:
            self._mutex.release()
        return self._reading.setdefault(0, _KAZOO) is _KAZOO

    def release(self) -> None:
        """Gives up the role of kazoo's thread."""
        if self._reading.get(0) is _KAZOO:
            del self._reading[0]

    def wait_until_idle(self) -> None:
        """Returns once no other thread is processing replies."""
        with self._mutex:
            pass

    # The threads that wait

    def wait(self, completion: BlockingCompletion, seconds: float) -> bool:
        """Waits for a reply, reading the socket if needed; false after so many seconds."""
        if not self.shared:
            return completion.wait_for_reader(seconds)
        until = now() + seconds
        if is_held_by_this_thread(self._mutex):
            self._abort()
        try:  # an interrupt at any line must not leave other threads without a reader
            self._waiting[completion] = None
            alone = len(self._waiting) == 1 and self._socket is not None
            if alone and self._reading.setdefault(0, completion) is completion:
                self._read_until(completion, until)
            elif self._yielding and 0 not in self._reading:
                self._wake_kazoo()
            return completion.answered or completion.wait_for_reader(until - now())
        finally:
            try:
                self._end_wait(completion, interrupted=False)
            except BaseException:  # an interrupt right here
                self._end_wait(completion, interrupted=True)
                raise

    def _abort(self) -> None:
        """In a signal handler whose own thread holds the mutex and continues only after it: ends
        the connection."""
        sock, self._mutex = self._socket, threading.RLock()
        if sock is not None:
            sock.shut()
        self._wake_kazoo()

    def _end_wait(self, completion: BlockingCompletion, *, interrupted: bool) -> None:
        self._release_role(completion)
        self._waiting.pop(completion, None)
        if interrupted or (self._waiting and self._yielding and 0 not in self._reading):
            self._wake_kazoo()

    def _release_role(self, completion: BlockingCompletion) -> None:
        mutex = self._mutex
        with mutex:
            if self._reading.get(0) is completion:
                # One atomic step: after a handler ran right here, another thread may have the role.
                self._reading.pop(0 if self._mutex is mutex else -1, None)

    def _wake_kazoo(self) -> None:
        self._last_read = self._missed_at = NEVER
        self.wake_kazoo()

    def _read_until(self, completion: BlockingCompletion, until: float) -> None:
        """Reads until the reply is there, or until the rest is left to kazoo."""
        sock, poll = self._socket, self._poll
        if sock is None:  # the connection broke just now
            self._release_role(completion)
            self._wake_kazoo()
            return
        while not completion.answered and (left := until - now()) > 0:
            completion.interrupt = self._interrupt_poll
            found = () if completion.answered else poll.poll(min(left, LONGEST_WAIT_SECONDS) * 1000)
            completion.interrupt = None
            for fileno, _ in found:
                if fileno == self._wakeup_fd:
                    self._drain()
            if found and not self._read_available(completion, sock):
                self._release_role(completion)
                self._wake_kazoo()
                return

    def _read_available(self, completion: BlockingCompletion, sock: SharedSocket) -> bool:
        """Processes the replies that have arrived; whether this thread reads on."""
        goes_on = False
        try:
            with self._mutex:
                if self._socket is sock and self._reading.get(0) is completion:
                    self._last_read = now()
                    goes_on = self.read()
        except BaseException as error:
            # It is unknown how much was processed. kazoo's thread finds the connection closed, and
            # fails all pending requests.
            sock.shut()
            if not isinstance(error, OSError) or error.errno is None:
                self._wake_kazoo()
                raise  # an interrupt
        return goes_on

    def _interrupt_poll(self) -> None:
        """Ends the poll of the thread that waits at the socket."""
        if self._wakeup_pair is not None:
            with suppress(OSError):  # full already, or closed
                self._wakeup_pair[1].send(b"\0")

    def _drain(self) -> None:
        if self._wakeup_pair is not None:
            with suppress(OSError):
                self._wakeup_pair[0].recv(4096)
