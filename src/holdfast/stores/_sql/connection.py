"""Connections to MySQL or PostgreSQL on the drivers of ``io``: opening, and a client's pool.

A store's own connection class (``mysql.connection``, ``postgres.connection``) is a protocol: it
says how a request is sent and how its reply is read. How one is opened is written once, over a
``World``. The sessions that hold locks are in ``session``.
"""

from __future__ import annotations

import os
import socket
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from holdfast.core.contract import Finding, Runtime, Settings
from holdfast.errors import BackendUnavailable
from holdfast.io.connection import PENDING, AllBusy, Connection, World, exchange
from holdfast.io.wakeups import poller

__all__ = [
    "Dial",
    "Dropped",
    "HostFailures",
    "Opening",
    "SharedConnection",
    "SqlConnection",
    "SqlPool",
    "SqlRefused",
    "stored_findings",
    "world_of",
]

C = TypeVar("C", bound="SqlConnection")
C_co = TypeVar("C_co", bound="SqlConnection", covariant=True)
Request = TypeVar("Request")
Answer = TypeVar("Answer")
Request_contra = TypeVar("Request_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)

Dial = Callable[[World, float], Awaitable[C_co]]
"""Opens, checks and prepares a connection, before the given deadline."""


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


class SqlConnection(Connection):
    """One connection and its session on the server, for one request at a time. What it raises is
    a ``BackendUnavailable``; whoever uses it closes it then."""

    look_first = True
    server: str
    """The server's address, for messages."""

    def _watch(self) -> None:
        """To be called when ``fd`` is known."""
        self.poll = poller(self.fd)

    @property
    def open(self) -> bool:
        return self.fd >= 0

    @abstractmethod
    def for_caller(self, reply: Any) -> Any:
        """Returns a reply as callers get it; may raise ``SqlRefused``."""

    @abstractmethod
    def checked(self, reply: Any) -> Any:
        """Returns the content of a reply; raises ``SqlRefused`` if the reply is an error."""

    def reply_started(self) -> bool:
        """True if the first part of a reply is known to have arrived."""
        return False

    def late(self) -> BackendUnavailable:
        """Returns the error for a request without a reply in time."""
        return self.broken("no answer in time")

    def broken(self, cause: str) -> BackendUnavailable:
        """Returns the error for a request without a reply."""
        return BackendUnavailable(f"{self.server} did not answer: {cause.strip()}")

    def dropped(self, cause: object) -> Dropped:
        """Returns the error for a connection that has ended."""
        return Dropped(f"{self.server} dropped the connection: {str(cause).strip()}")

    def has_input(self) -> bool:
        """True if input is waiting, or the connection is closed."""
        return self.fd < 0 or bool(self.poll(0))

    def is_alive(self) -> bool:
        """True unless the server has ended the session. Only valid if no reply is pending. Reads
        the input: it may be a notice, a changed setting or a ticket of TLS."""
        try:
            if self.open and self.has_input():
                self.collect()
                return self.next() is PENDING and not self.has_input()
        except OSError:
            self.close()
        return self.open

    def sever(self) -> None:
        """Shuts the socket down, so that its reader sees the end and closes it. From any thread."""
        if self.open:
            with suppress(OSError), socket.socket(fileno=os.dup(self.fd)) as ours:
                ours.shutdown(socket.SHUT_RDWR)


class Opening(Generic[C]):
    """A new connection that nothing else uses, and the deadline until which it is prepared."""

    def __init__(self, world: World, connection: C, until: float) -> None:
        self.world, self.connection, self.until = world, connection, until

    async def ask(self, request: Any) -> Any:
        """Sends one request and returns its reply, as callers get it. After an exception other
        than ``SqlRefused`` the connection must be closed."""
        connection = self.connection
        try:
            (reply,) = await exchange(self.world, connection, [request], self.until)
        except TimeoutError:
            raise connection.late() from None
        if not connection.usable:
            connection.close()
        return connection.for_caller(reply)


class SharedConnection(Protocol[Request_contra, Answer_co]):
    """A connection outside the pool that takes requests while it is not otherwise in use."""

    def request(self, request: Request_contra, until: float | None) -> Answer_co | None:
        """Returns the reply, or None if the connection is in use at the moment."""
        ...


class _Endpoint:
    """A server, as the pools of ``io`` need it."""

    def __init__(self, dial: Dial[SqlConnection], seconds: float, display: str) -> None:
        self._dial, self.request_seconds, self._display = dial, seconds, display

    async def open(self, world: World, until: float) -> SqlConnection:
        return await self._dial(world, until)

    def failure(self, error: OSError, seconds: float) -> Exception:
        if isinstance(error, BackendUnavailable):  # a new one: many tasks may raise it
            return type(error)(*error.args)
        if isinstance(error, AllBusy):
            return BackendUnavailable(f"{self._display}: {error}")
        cause = "no answer in time" if isinstance(error, TimeoutError) else error
        return BackendUnavailable(f"{self._display} did not answer: {cause}")


class SqlPool(Generic[Request, Answer]):
    """A few connections, each for one request at a time, shared by all callers of one client."""

    def __init__(
        self,
        runtime: Runtime,
        dial: Dial[SqlConnection],
        settings: Settings,
        display: str,
        checked: Callable[[Answer, str], Answer] | None = None,
    ) -> None:
        """``checked`` raises for a reply that is an error."""
        endpoint = _Endpoint(dial, settings.request_seconds, display)
        self._checked, self._display = checked, display
        self.shared: SharedConnection[Request, Answer] | None = None
        """Gets a request first, before the pool's own connections: of a blocking client."""
        self._blocking = runtime.blocking
        self._pool: Any
        if runtime.blocking:
            from holdfast.io.blocking import BlockingPool

            self._pool = BlockingPool(endpoint, settings.connections)
        else:
            from holdfast.io.aio import AsyncPool

            self._pool = AsyncPool(endpoint, settings.connections, pipelined=False)

    async def request(
        self, request: Request, owner: str = "", until: float | None = None
    ) -> Answer:
        """Returns the reply, or raises ``BackendUnavailable`` by the deadline. Runs after a
        cancelled request of the same owner."""
        reply = None if self.shared is None else self.shared.request(request, until)
        if reply is None and self._blocking:
            reply = self._pool.request(request, until)
        elif reply is None:
            reply = await self._pool.request(request, until, owner)
        return reply if self._checked is None else self._checked(reply, self._display)

    def detach(self) -> SqlConnection | None:
        """Takes an idle connection of a blocking client out of the pool for good. It no longer
        counts against the limit."""
        found: SqlConnection | None = self._pool.detach()
        return found

    def forget(self) -> None:
        """In a forked child, or on a later event loop."""
        self.shared = None
        self._pool.forget()

    def close(self) -> None:
        """Closes the idle connections now, and the others when they are returned."""
        self._pool.close()


def world_of(runtime: Runtime) -> World:
    """Returns what waits for descriptors: the calling thread, or the running event loop."""
    if runtime.blocking:
        from holdfast.io import blocking

        return blocking.WORLD
    from holdfast.io import aio

    return aio.WORLD


def stored_findings(
    namespace: str, mode: str, *, tables: bool, used: bool, needs: str = ""
) -> list[Finding]:
    """Returns what ``check()`` says about our tables and the namespace, which it does not make.
    ``needs`` is a right to make the tables of which the server can't tell whether it is there."""
    made = "there" if tables else "not there yet: the first acquire makes them"
    if needs and not tables:
        made += f", if this account has the right {needs}"
    bound = f"{namespace!r} is used in {mode} mode"
    if not used:
        bound = f"{namespace!r} is not in use yet: the first acquire binds it to {mode} mode"
    return [Finding("tables", made), Finding("namespace", bound)]
