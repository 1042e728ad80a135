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
from holdfast.stores.zookeeper.client.calls import LONGEST_WAIT_SECONDS, BlockingCall

__all__ = ["Reader", "is_mine"]

ASIDE_SECONDS = 0.2
"""How long kazoo's thread leaves the socket alone after somebody else has read it."""
NEVER = float("-inf")
_KAZOO = object()


class Socket(Protocol):
    def fileno(self) -> int: ...
    def shut(self) -> None: ...


def is_mine(lock: Any) -> bool:
    """Whether this thread has it: one that asks again is in a signal's handler."""
    return bool(lock._is_owned())


def _nothing() -> bool:
    return False


class Reader:
    """The readers of one session's connection, one at a time."""

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared and hasattr(select, "poll")
        """Whether threads that wait may read."""
        self.read: Callable[[], bool] = _nothing
        """Takes in what has arrived; false if that is left to kazoo."""
        self.call_kazoo: Callable[[], object] = _nothing
        """Makes its thread look who reads."""
        self._reading: dict[int, object] = {}
        """Who reads, under the key 0: taking the place is one step."""
        self._waiting: dict[BlockingCall, None] = {}
        self._mutex = threading.RLock()
        """Held by a thread while it takes in what has arrived, and as it leaves."""
        self._wire: Socket | None = None
        self._poll: Any = None
        self._heard = NEVER
        self._missed: tuple[object, float] = (None, NEVER)
        self._missed_at = NEVER
        self._aside = False
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._called = -1

    # The connection, on kazoo's thread

    def attach(self, wire: Socket) -> None:
        """From here on there are answers to read."""
        if self.shared and self._pair is None:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)
            self._called = self._pair[0].fileno()
        self._listen_to(wire)
        self._wire = wire

    def _listen_to(self, wire: Socket) -> None:
        # Anew each time: one who is kept from reading may still be in the old one.
        if self._pair is not None:
            self._poll = select.poll()
            self._poll.register(wire.fileno(), select.POLLIN)
            self._poll.register(self._called, select.POLLIN)

    def detach(self) -> None:
        """Nobody else reads from here on: those who wait for an answer are about to be told."""
        with self._mutex:
            self._wire = None
        self._stir()

    def close(self) -> None:
        pair, self._pair, self._wire = self._pair, None, None
        for end in pair or ():
            end.close()

    # The place of the reader, on kazoo's thread

    def stands_aside(self) -> bool:
        """Whether to leave the socket to others for now; ``come_back`` ends it."""
        if not self.shared and not self._reading:
            return False
        self._aside = True  # before the look at who waits: see wait()
        by_others = 0 in self._reading or not self._waiting
        last = max(self._heard if self.shared else NEVER, self._missed_at)
        self._aside = by_others and now() < last + ASIDE_SECONDS
        return self._aside

    def come_back(self) -> None:
        self._aside = False

    def take(self) -> bool:
        """Something has arrived: whether it is up to kazoo's thread to read it."""
        reader = self._reading.setdefault(0, _KAZOO)
        if reader is _KAZOO:
            return True
        missed = reader, self._heard
        if missed == self._missed and self._depose(reader):
            return True
        self._missed, self._missed_at = missed, now()
        return False

    def _depose(self, reader: object) -> bool:
        """One who has not read for a while although it could."""
        if not self._mutex.acquire(blocking=False):
            return False  # it does
        try:
            if self._reading.get(0) is reader and self._wire is not None:
                self._listen_to(self._wire)
                self._reading[0] = _KAZOO
        finally:
            self._mutex.release()
        return self._reading.setdefault(0, _KAZOO) is _KAZOO

    def leave(self) -> None:
        """kazoo's thread has read what it took."""
        if self._reading.get(0) is _KAZOO:
            del self._reading[0]

    def catch_up(self) -> None:
        """Returns once nobody is in the middle of what has arrived."""
        with self._mutex:
            pass

    # The threads that wait

    def wait(self, call: BlockingCall, seconds: float) -> bool:
        """Whether it was answered in time."""
        if not self.shared:
            return call.follow(seconds)
        until = now() + seconds
        if is_mine(self._mutex):
            self._tear()
        try:  # an interrupt at any point must not leave the others without a reader
            self._waiting[call] = None
            alone = len(self._waiting) == 1 and self._wire is not None
            if alone and self._reading.setdefault(0, call) is call:
                self._read_until(call, until)
            elif self._aside and 0 not in self._reading:
                self._call_kazoo()
            return call.answered or call.follow(until - now())
        finally:
            try:
                self._leave(call, torn=False)
            except BaseException:  # an interrupt right here
                self._leave(call, torn=True)
                raise

    def _tear(self) -> None:
        """In a signal's handler: its thread has the mutex, and goes on only after it."""
        wire, self._mutex = self._wire, threading.RLock()
        if wire is not None:
            wire.shut()
        self._call_kazoo()

    def _leave(self, call: BlockingCall, *, torn: bool) -> None:
        self._resign(call)
        self._waiting.pop(call, None)
        if torn or (self._waiting and self._aside and 0 not in self._reading):
            self._call_kazoo()

    def _resign(self, call: BlockingCall) -> None:
        mutex = self._mutex
        with mutex:
            if self._reading.get(0) is call:
                # In one step: whoever was let in by a handler right here may have the place.
                self._reading.pop(0 if self._mutex is mutex else -1, None)

    def _call_kazoo(self) -> None:
        self._heard = self._missed_at = NEVER
        self.call_kazoo()

    def _read_until(self, call: BlockingCall, until: float) -> None:
        """Reads until it is answered, or until the rest is kazoo's."""
        wire, poll = self._wire, self._poll
        if wire is None:  # the connection broke in this moment
            self._resign(call)
            self._call_kazoo()
            return
        while not call.answered and (left := until - now()) > 0:
            call.stir = self._stir
            found = () if call.answered else poll.poll(min(left, LONGEST_WAIT_SECONDS) * 1000)
            call.stir = None
            for fileno, _ in found:
                if fileno == self._called:
                    self._drain()
            if found and not self._take_in(call, wire):
                self._resign(call)
                self._call_kazoo()
                return

    def _take_in(self, call: BlockingCall, wire: Socket) -> bool:
        """Whether to go on reading."""
        goes_on = False
        try:
            with self._mutex:
                if self._wire is wire and self._reading.get(0) is call:
                    self._heard = now()
                    goes_on = self.read()
        except BaseException as error:
            # There is no telling any more what was read. kazoo's thread finds the end of the
            # connection, and tells all who wait for an answer.
            wire.shut()
            if not isinstance(error, OSError) or error.errno is None:
                self._call_kazoo()
                raise  # an interrupt
        return goes_on

    def _stir(self) -> None:
        """Ends the wait of whoever is at the socket."""
        if self._pair is not None:
            with suppress(OSError):  # full of calls already, or closed
                self._pair[1].send(b"\0")

    def _drain(self) -> None:
        if self._pair is not None:
            with suppress(OSError):
                self._pair[0].recv(4096)
