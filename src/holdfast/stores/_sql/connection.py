"""The interface of a connection to MySQL or PostgreSQL, and of a pool of such connections.

A store's own connection class (``mysql.connection``, ``postgres.connection``) implements how a
request is sent and how its answer is read. The code over it exists once: the pools (``blocking``,
``aio``) and the sessions that hold locks (``session``, ``session_blocking``, ``session_aio``).
"""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from holdfast.core.contract import Finding, Runtime, Settings
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now

__all__ = [
    "Dial",
    "Dropped",
    "HostFailures",
    "SqlConnection",
    "SqlPool",
    "SqlRefused",
    "make_pool",
    "run_apart",
    "stored_findings",
]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Request_contra = TypeVar("Request_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)
C = TypeVar("C")

Dial = Callable[[float], C]
"""Opens, checks and prepares a connection with blocking calls, before the given deadline."""


class SqlRefused(BackendUnavailable):
    """The server answered with an error."""


class Dropped(BackendUnavailable):
    """The connection was closed by the client, the server or the network. The server has ended
    its session or is about to."""


class HostFailures:
    """Why each host of an address could not be used. A host may have several IP addresses."""

    def __init__(self, display: str) -> None:
        self._display = display
        self._by_host: dict[object, BackendUnavailable] = {}

    def add(self, host: object, failure: BackendUnavailable) -> None:
        """Keeps the failure of a host; a final refusal by one of its addresses is kept."""
        if host not in self._by_host or not self._by_host[host].final:
            self._by_host[host] = failure

    def error(self) -> BackendUnavailable:
        """Returns the last failure; a final one only if all hosts have refused finally."""
        failures = list(self._by_host.values())
        passing = [failure for failure in failures if not failure.final]
        none = BackendUnavailable(f"{self._display}: no host")
        return (passing or failures or [none])[-1]


class SqlConnection(ABC, Generic[Request, Answer]):
    """One connection and its session on the server. Used by one caller at a time."""

    __slots__ = ("__weakref__", "_made_in", "_outgoing", "_poll", "home", "server")

    def __init__(self, fileno: int, server: str) -> None:
        self.server = server
        self.home: object = None
        """Identifies the pool that the connection is returned to after use."""
        self._outgoing = b""
        """Bytes that are not sent yet."""
        self._poll = select.poll()
        self._poll.register(fileno, select.POLLIN)
        self._made_in = os.getpid()  # 0 after ``forget``

    @abstractmethod
    def fileno(self) -> int: ...

    @property
    @abstractmethod
    def open(self) -> bool: ...

    @abstractmethod
    def unblock(self) -> None:
        """Makes ``send`` non-blocking: bytes that do not fit are left to ``flush``."""

    @abstractmethod
    def send(self, request: Request) -> None:
        """Sends a request. Its answer must be collected before the next request is sent."""

    @abstractmethod
    def flush(self) -> bool:
        """Sends the bytes that are left; returns True when none are left."""

    @abstractmethod
    def collect(self) -> Answer | None:
        """Reads the available input; returns the answer once it is complete, else None."""

    @abstractmethod
    def reply_started(self) -> bool:
        """True if the first part of an answer is known to have arrived."""

    @abstractmethod
    def checked(self, answer: Answer) -> object:
        """Returns the content of an answer; raises ``SqlRefused`` if the answer is an error."""

    @abstractmethod
    def for_caller(self, answer: Answer) -> Answer:
        """Returns the answer as ``request`` returns it; may raise ``SqlRefused``."""

    def request(self, request: Request, until: float) -> Answer:
        """Sends one request and returns its answer. Closes the connection if there is none in
        time."""
        try:
            self.send(request)
            if self._outgoing:
                self._send_rest(until)
            answer = self.receive(until)
            if answer is None:
                raise self.broken("no answer in time")
            return answer
        except BaseException:  # also an interrupt: the answer is still pending
            self.close()
            raise

    def _send_rest(self, until: float) -> None:
        while self._outgoing:
            if not self._ready(select.POLLOUT | select.POLLIN, until):
                raise self.broken("the send buffer stayed full")
            self.flush()

    def _ready(self, events: int, until: float) -> bool:
        self._poll.modify(self.fileno(), events)
        try:
            return bool(self._poll.poll(max(0.0, until - now()) * 1000 + 1))
        finally:
            self._poll.modify(self.fileno(), select.POLLIN)

    def receive(self, until: float, enough: Callable[[], bool] | None = None) -> Answer | None:
        """Returns the answer, or None if it is not complete by ``until``. Returns None early if
        ``enough`` says that the input read so far is sufficient."""
        while True:
            left = until - now()
            if not self._poll.poll(left * 1000 + 1 if left > 0 else 0):
                return None
            answer = self.collect()
            if answer is not None or (enough is not None and enough()):
                return answer

    def arrived(self) -> Answer | None:
        """Returns the answer if it is complete now, without waiting."""
        return self.receive(0.0)  # in a loop: the end of a session may follow its last message

    def broken(self, cause: str) -> BackendUnavailable:
        """Returns the error for a request without an answer."""
        return BackendUnavailable(f"{self.server} did not answer: {cause.strip()}")

    def dropped(self, cause: object) -> Dropped:
        """Closes the connection and returns the error for it."""
        self.close()
        return Dropped(f"{self.server} dropped the connection: {str(cause).strip()}")

    def has_input(self) -> bool:
        """True if input is waiting. On an idle connection that is mostly the session's end."""
        return bool(self._poll.poll(0))

    @abstractmethod
    def is_alive(self) -> bool:
        """True unless the server has ended the session. Only valid if no answer is pending."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def sever(self) -> None:
        """Shuts the socket down, so that its reader sees the end and closes it. From any thread."""

    @abstractmethod
    def forget(self) -> None:
        """In a forked child: drops the socket without sending anything to the server."""

    def leave(self, unused: bool) -> None:
        """Drops the connection. If it is no longer used in the process that opened it, such as the
        connection of an event loop that was closed, it is closed; else it is forgotten."""
        if unused and self._made_in == os.getpid():
            self.close()
        else:
            self.forget()


class SqlPool(Protocol[Request_contra, Answer_co]):
    """A few connections, shared by all callers of one client."""

    async def request(
        self, request: Request_contra, owner: str = "", until: float | None = None
    ) -> Answer_co: ...

    def forget(self) -> None: ...

    async def close(self) -> None: ...


def make_pool(
    runtime: Runtime, dial: Dial[SqlConnection[Request, Answer]], settings: Settings, display: str
) -> SqlPool[Request, Answer]:
    """Returns a pool for the threads or for the event loop of a client."""
    limit, seconds = settings.connections, settings.request_seconds
    if runtime.blocking:
        from holdfast.stores._sql.blocking import BlockingSqlPool

        return BlockingSqlPool(dial, limit, seconds, display)
    from holdfast.stores._sql.aio import AsyncSqlPool

    return AsyncSqlPool(dial, limit, seconds, display)


async def run_apart(runtime: Runtime, work: Callable[[], C]) -> C:
    """Runs blocking work that leaves nothing open: here, or for an event loop on a thread of its
    own."""
    if runtime.blocking:
        return work()
    from holdfast.stores._sql.aio import in_thread

    return await in_thread(work, lambda _: None)


def stored_findings(namespace: str, mode: str, *, tables: bool, used: bool) -> list[Finding]:
    """Returns what ``check()`` says about our tables and the namespace, which it does not make."""
    made = "there" if tables else "not there yet: the first acquire makes them"
    bound = f"{namespace!r} is used in {mode} mode"
    if not used:
        bound = f"{namespace!r} is not in use yet: the first acquire binds it to {mode} mode"
    return [Finding("tables", made), Finding("namespace", bound)]
