"""Who reads what ZooKeeper says: the thread that waits for it, else kazoo's.

A thread that waits alone reads the socket itself, so no other stands between the server and it.
kazoo's thread stands aside meanwhile, and for a moment after: the next request may come soon.
Where several wait, or something comes that is kazoo's, its thread reads for all.

One who reads is found by being the one in ``_reading``; whatever an interrupt tears, it leaves
that place, and kazoo's thread takes it from one who does not read because a signal's handler keeps
it. A handler that waits itself, in the middle of what its thread was taking in, ends the
connection: there is no other way to go on before that thread does.
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
"""How long kazoo's thread leaves the socket alone after somebody else has read it."""
NEVER = float("-inf")
_KAZOO = object()


class SharedSocket(Protocol):
    def fileno(self) -> int: ...
    def shut(self) -> None: ...


def is_held_by_this_thread(lock: Any) -> bool:
    """Whether this thread has it: one that asks again is in a signal's handler."""
    return bool(lock._is_owned())


def _nothing() -> bool:
    return False


class SharedReader:
    """The readers of one session's connection, one at a time."""

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared and hasattr(select, "poll")
        """Whether threads that wait may read."""
        self.read: Callable[[], bool] = _nothing
        """Takes in what has arrived; false if that is left to kazoo."""
        self.wake_kazoo: Callable[[], object] = _nothing
        """Makes its thread look who reads."""
        self._reading: dict[int, object] = {}
        """Who reads, under the key 0: taking the place is one step."""
        self._waiting: dict[BlockingCompletion, None] = {}
        self._mutex = threading.RLock()
        """Held by a thread while it takes in what has arrived, and as it leaves."""
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
        """From here on there are answers to read."""
        if self.shared and self._wakeup_pair is None:
            self._wakeup_pair = socket.socketpair()
            for end in self._wakeup_pair:
                end.setblocking(False)
            self._wakeup_fd = self._wakeup_pair[0].fileno()
        self._make_poll(sock)
        self._socket = sock

    def _make_poll(self, sock: SharedSocket) -> None:
        # Anew each time: one who is kept from reading may still be in the old one.
        if self._wakeup_pair is not None:
            self._poll = select.poll()
            self._poll.register(sock.fileno(), select.POLLIN)
            self._poll.register(self._wakeup_fd, select.POLLIN)

    def detach(self) -> None:
        """Nobody else reads from here on: those who wait for an answer are about to be told."""
        with self._mutex:
            self._socket = None
        self._interrupt_poll()

    def close(self) -> None:
        pair, self._wakeup_pair, self._socket = self._wakeup_pair, None, None
        for end in pair or ():
            end.close()

    # The place of the reader, on kazoo's thread

    def yields(self) -> bool:
        """Whether to leave the socket to others for now; ``come_back`` ends it."""
        if not self.shared and not self._reading:
            return False
        self._yielding = True  # before the look at who waits: see wait()
        by_others = 0 in self._reading or not self._waiting
        last = max(self._last_read if self.shared else NEVER, self._missed_at)
        self._yielding = by_others and now() < last + YIELD_SECONDS
        return self._yielding

    def end_yield(self) -> None:
        self._yielding = False

    def acquire(self) -> bool:
        """Something has arrived: whether it is up to kazoo's thread to read it."""
        reader = self._reading.setdefault(0, _KAZOO)
        if reader is _KAZOO:
            return True
        missed = reader, self._last_read
        if missed == self._missed and self._take_over(reader):
            return True
        self._missed, self._missed_at = missed, now()
        return False

    def _take_over(self, reader: object) -> bool:
        """One who has not read for a while although it could."""
        if not self._mutex.acquire(blocking=False):
            return False  # it does
        try:
            if self._reading.get(0) is reader and self._socket is not None:
                self._make_poll(self._socket)
                self._reading[0] = _KAZOO
        finally:
            self._mutex.release()
        return self._reading.setdefault(0, _KAZOO) is _KAZOO

    def release(self) -> None:
        """kazoo's thread has read what it took."""
        if self._reading.get(0) is _KAZOO:
            del self._reading[0]

    def wait_until_idle(self) -> None:
        """Returns once nobody is in the middle of what has arrived."""
        with self._mutex:
            pass

    # The threads that wait

    def wait(self, completion: BlockingCompletion, seconds: float) -> bool:
        """Whether it was answered in time."""
        if not self.shared:
            return completion.wait_for_reader(seconds)
        until = now() + seconds
        if is_held_by_this_thread(self._mutex):
            self._abort()
        try:  # an interrupt at any point must not leave the others without a reader
            self._waiting[completion] = None
            alone = len(self._waiting) == 1 and self._socket is not None
            if alone and self._reading.setdefault(0, completion) is completion:
                self._read_until(completion, until)
            elif self._yielding and 0 not in self._reading:
                self._wake_kazoo()
            return completion.answered or completion.wait_for_reader(until - now())
        finally:
            try:
                self._end_wait(completion, torn=False)
            except BaseException:  # an interrupt right here
                self._end_wait(completion, torn=True)
                raise

    def _abort(self) -> None:
        """In a signal's handler: its thread has the mutex, and goes on only after it."""
        sock, self._mutex = self._socket, threading.RLock()
        if sock is not None:
            sock.shut()
        self._wake_kazoo()

    def _end_wait(self, completion: BlockingCompletion, *, torn: bool) -> None:
        self._release_role(completion)
        self._waiting.pop(completion, None)
        if torn or (self._waiting and self._yielding and 0 not in self._reading):
            self._wake_kazoo()

    def _release_role(self, completion: BlockingCompletion) -> None:
        mutex = self._mutex
        with mutex:
            if self._reading.get(0) is completion:
                # In one step: whoever was let in by a handler right here may have the place.
                self._reading.pop(0 if self._mutex is mutex else -1, None)

    def _wake_kazoo(self) -> None:
        self._last_read = self._missed_at = NEVER
        self.wake_kazoo()

    def _read_until(self, completion: BlockingCompletion, until: float) -> None:
        """Reads until it is answered, or until the rest is kazoo's."""
        sock, poll = self._socket, self._poll
        if sock is None:  # the connection broke in this moment
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
        """Whether to go on reading."""
        goes_on = False
        try:
            with self._mutex:
                if self._socket is sock and self._reading.get(0) is completion:
                    self._last_read = now()
                    goes_on = self.read()
        except BaseException as error:
            # There is no telling any more what was read. kazoo's thread finds the end of the
            # connection, and tells all who wait for an answer.
            sock.shut()
            if not isinstance(error, OSError) or error.errno is None:
                self._wake_kazoo()
                raise  # an interrupt
        return goes_on

    def _interrupt_poll(self) -> None:
        """Ends the wait of whoever is at the socket."""
        if self._wakeup_pair is not None:
            with suppress(OSError):  # full of calls already, or closed
                self._wakeup_pair[1].send(b"\0")

    def _drain(self) -> None:
        if self._wakeup_pair is not None:
            with suppress(OSError):
                self._wakeup_pair[0].recv(4096)
