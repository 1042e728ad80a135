"""Whose turn it is to read a connection: kazoo's thread's, or that of one who waits.

A thread that waits for an answer reads the socket itself, and whatever else has come with it:
handing answers over from kazoo's thread costs more than the answers do. kazoo's thread steps
aside only where it waits anyway, and has its turn back before any of its own code runs on.

Whoever gives its turn away looks afterwards whether somebody counts on being read for, so that
nobody is left alone. Should an interrupt tear that apart, the next heartbeat finds it.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Final

from holdfast.runtimes.clock import now

__all__ = ["Reader", "Turn"]

RECLAIM_SECONDS = 1.0
"""A reader leaves as soon as it is called. One that was torn apart, or is interrupted by a
handler that waits itself, never does: its connection is given up."""
_PAUSE_SECONDS = 0.0002
_WHO: Final = 0


class Reader:
    """A thread that waits, and reads meanwhile."""

    __slots__ = ("polling", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.polling = False
        """Whether it only waits, so that nothing is torn if it is interrupted."""


class Turn:
    """Who reads one connection. No lock: an interrupt may come anywhere, also between the taking
    of a lock and the knowledge of it."""

    def __init__(self) -> None:
        self.wished = False
        """Whether a thread would have read by itself, had kazoo's not been at it."""
        self.called = False
        """Whether kazoo's thread wants its turn back."""
        self._who: dict[int, Turn | Reader] = {_WHO: self}  # kazoo's thread is the turn itself
        self._robbed: dict[Turn | Reader, None] = {}
        """Readers below a signal's handler. They go on to listen when that ends."""
        self._bell: tuple[socket.socket, socket.socket] | None = None

    @property
    def free(self) -> bool:
        return _WHO not in self._who

    @property
    def kazoos(self) -> bool:
        return self._who.get(_WHO) is self

    def of(self, reader: Reader) -> bool:
        return self._who.get(_WHO) is reader

    def take(self, reader: Turn | Reader) -> bool:
        """Takes the turn if nobody has it."""
        return self._who.setdefault(_WHO, reader) is reader

    def steal(self, reader: Reader) -> bool:
        """Takes it from the same thread, where a signal's handler runs while that waits."""
        other = self._who.get(_WHO)
        if not isinstance(other, Reader) or other.thread != reader.thread or not other.polling:
            return False
        self._robbed[other] = None
        self._who[_WHO] = reader
        return True

    def leave(self, reader: Turn | Reader) -> None:
        """Gives it away; nothing happens if it is somebody else's."""
        if self._who.get(_WHO) is reader:
            self._who.pop(_WHO, None)
        if self._robbed:
            self._robbed.pop(reader, None)
            self._ring()

    def reclaim(self) -> None:
        """On kazoo's thread: has the reader leave, and takes the turn."""
        if self.kazoos:
            return
        deadline = now() + RECLAIM_SECONDS
        self.called = True
        try:
            while not self.take(self):
                self.stir()
                if now() > deadline:
                    self._who[_WHO] = self
                    raise TimeoutError("a thread that reads does not leave")
                time.sleep(_PAUSE_SECONDS)
        finally:
            self.called = False

    # The reader's bell

    @property
    def bell(self) -> int:
        """What a reader listens to besides the connection."""
        if self._bell is None:
            inside, outside = socket.socketpair()
            inside.setblocking(False)
            outside.setblocking(False)
            self._bell = inside, outside
        return self._bell[0].fileno()

    def stir(self) -> None:
        """Has the reader look up, whoever it is."""
        if isinstance(self._who.get(_WHO), Reader):
            self._ring()

    def _ring(self) -> None:
        if self._bell is not None:
            with suppress(OSError):  # full of calls already, or closed
                self._bell[1].send(b"\0")

    def answer(self) -> None:
        """The reader has heard it."""
        if self._bell is not None:
            with suppress(OSError):
                self._bell[0].recv(4096)

    def close(self) -> None:
        if self._bell is not None:
            for end in self._bell:
                end.close()
