"""What MySQL and PostgreSQL have in common: a connection that answers one request at a time.

A driver's own connection (``mysql``, ``postgres``) says how a request is sent and an answer read.
Everything else is written once, over it: the wires (``sql_wire``), and the sessions that hold
locks (``sql_session``, ``sql_talk``).
"""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now

__all__ = ["Connection", "Dial", "Dropped", "Refused"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
C = TypeVar("C")

Dial = Callable[[float], C]
"""Opens, checks and prepares a connection by then, by blocking calls."""


class Refused(BackendUnavailable):
    """The server answered with an error."""


class Dropped(BackendUnavailable):
    """The connection ended, from whichever side: its session has ended or will."""


class Connection(ABC, Generic[Request, Answer]):
    """One session. Used by one caller at a time."""

    __slots__ = ("__weakref__", "_made_in", "_outgoing", "_poll", "home", "server")

    def __init__(self, fileno: int, server: str) -> None:
        self.server = server
        self.home: object = None
        """The wire that it goes back to after use."""
        self._outgoing = b""
        """What is left to send."""
        self._poll = select.poll()
        self._poll.register(fileno, select.POLLIN)
        self._made_in = os.getpid()  # 0 once it is forgotten

    @abstractmethod
    def fileno(self) -> int: ...

    @property
    @abstractmethod
    def open(self) -> bool: ...

    @abstractmethod
    def unblock(self) -> None:
        """Lets ``send`` return at once from now on, whatever is left to ``flush``."""

    @abstractmethod
    def send(self, request: Request) -> None:
        """Sends a request; its answer must be collected before the next."""

    @abstractmethod
    def flush(self) -> bool:
        """Sends what is left to send; whether all of it is gone."""

    @abstractmethod
    def collect(self) -> Answer | None:
        """Reads what has come; the answer once it is complete."""

    @abstractmethod
    def comes(self) -> bool:
        """Whether it is known that an answer has begun to come, so that the rest will soon."""

    @abstractmethod
    def checked(self, answer: Answer) -> object:
        """What the answer tells, or ``Refused``, raised."""

    @abstractmethod
    def given(self, answer: Answer) -> Answer:
        """The answer as who asked gets it; may raise ``Refused``."""

    def request(self, request: Request, until: float) -> Answer:
        """One request and its answer, as ``given``; one that did not answer in time is closed."""
        try:
            self.send(request)
            if self._outgoing:
                self._send_rest(until)
            answer = self.receive(until)
            if answer is None:
                raise self.broken("no answer in time")
            return answer
        except BaseException:  # also an interrupt: the answer is still to come
            self.close()
            raise

    def _send_rest(self, until: float) -> None:
        while self._outgoing:
            if not self._ready(select.POLLOUT | select.POLLIN, until):
                raise self.broken("no room to send")
            self.flush()

    def _ready(self, events: int, until: float) -> bool:
        self._poll.modify(self.fileno(), events)
        try:
            return bool(self._poll.poll(max(0.0, until - now()) * 1000 + 1))
        finally:
            self._poll.modify(self.fileno(), select.POLLIN)

    def receive(self, until: float, enough: Callable[[], bool] | None = None) -> Answer | None:
        """The answer, or nothing if it is not complete by then; or what has come is enough."""
        while True:
            left = until - now()
            if not self._poll.poll(left * 1000 + 1 if left > 0 else 0):
                return None
            answer = self.collect()
            if answer is not None or (enough is not None and enough()):
                return answer

    def arrived(self) -> Answer | None:
        """The answer, if it has come by now."""
        return self.receive(0.0)  # to the end: a session's may come right behind its last word

    def broken(self, cause: str) -> BackendUnavailable:
        """The error for a request that was not answered."""
        return BackendUnavailable(f"{self.server} did not answer: {cause.strip()}")

    def dropped(self, cause: object) -> Dropped:
        """The error for a connection that broke; closes it."""
        self.close()
        return Dropped(f"{self.server} dropped the connection: {str(cause).strip()}")

    def stirs(self) -> bool:
        """Whether something came in without being asked for: the session's end, mostly."""
        return bool(self._poll.poll(0))

    @abstractmethod
    def stands(self) -> bool:
        """Whether the server has said nothing of its end. Only if no answer is to come."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def sever(self) -> None:
        """Ends it for whoever reads it, who then closes it. From any thread."""

    @abstractmethod
    def forget(self) -> None:
        """In a forked child: lets go of the socket without a word to the server."""
