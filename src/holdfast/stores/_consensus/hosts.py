"""The hosts of one store that are equal, and requests to them: one at a time per connection.

Requests go to the current host; if it fails, the next host becomes the current one. ``Hosts`` knows
which is current, ``HostEndpoint`` opens connections for the pools of both drivers, and ``Wire``
sends requests over such a pool.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any, Generic, NamedTuple, TypeVar

from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.connection import AllBusy, Broken, Stream, World, open_socket

__all__ = ["HostConnection", "HostEndpoint", "Hosts", "Tls", "Wire"]

R = TypeVar("R")
C = TypeVar("C", bound="HostConnection")

MOST_HOST_SHARES = 3
"""The time of a request is divided by the number of hosts, but at most by this."""
TRUSTED_IDLE_SECONDS = 0.02
"""A connection that was idle for longer is checked before use: its server may have closed it."""
SILENT_SECONDS = 1.0
"""A host that has answered nothing for so long is left, or half the usual time of a request."""


class Tls(NamedTuple):
    """Paths of the certificates. Verification is always on."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def context(self, alpn: str) -> ssl.SSLContext:
        """``alpn``: the protocol to agree on, as its name is there; "" for none."""
        context = ssl.create_default_context(cafile=self.ca or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key or None)
        if alpn:
            context.set_alpn_protocols([alpn])
        return context


class Hosts:
    """The hosts of one store, and which of them is current. Shared by all its backends."""

    def __init__(
        self,
        display: str,
        hosts: tuple[tuple[str, int], ...],
        *,
        tls: Tls | None,
        request_seconds: float,
        alpn: str = "",
    ) -> None:
        self.display, self.hosts = display, hosts
        # A host that hangs, or lost a request in an election, must leave time for the others.
        self.request_seconds = request_seconds / min(len(hosts), MOST_HOST_SHARES)
        self.alpn = alpn
        """What TLS must agree on with the server; "" for nothing."""
        self.known = False
        """Whether a server has answered as this kind of store does. Before that, an answer of
        another kind means that it is another kind of server; later it may be a proxy's."""
        self.closed_hint = ""
        """Why the server may close connections, for messages."""
        self.current = 0
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self.authorities = [
            (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()
            for host, port in hosts
        ]

    @property
    def tls(self) -> bool:
        return self._tls is not None

    def context(self) -> ssl.SSLContext | None:
        """The TLS settings, read from their files at first use. A file that can't be read is a
        final refusal: no host and no later attempt changes that."""
        if self._tls is not None and self._context is None:
            try:
                self._context = self._tls.context(self.alpn)
            except (OSError, ssl.SSLError) as error:
                files = ", ".join(filter(None, self._tls))
                text = f"{self.display}: the files for TLS can't be used ({files}): {error}"
                raise BackendUnavailable(text, final=True) from None
        return self._context

    def name(self, host: int) -> str:
        return self.authorities[host].decode()

    def failed(self, host: int) -> None:
        """Makes the next host the current one, unless another thread has done so already."""
        if self.current == host:
            self.current = (host + 1) % len(self.hosts)

    def closed(self) -> BackendUnavailable:
        return BackendUnavailable(f"{self.display} was closed")

    def unavailable(self, tried: list[str]) -> BackendUnavailable:
        return BackendUnavailable(f"{self.display} can't be reached: {'; '.join(tried)}")

    def unknown(self, host: int, line: bytes, error: BaseException) -> BackendUnavailable:
        """The error for a request that was sent and has no answer."""
        what = line.partition(b"?")[0].decode()
        why = describe(error)
        if self.closed_hint and isinstance(error, Broken) and error.closed:
            why = f"{why} ({self.closed_hint})"
        return BackendUnavailable(f"{self.display}: {self.name(host)}: {what}: {why}")


def describe(error: BaseException) -> str:
    """An error as text that never contains parts of the request."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"{error.strerror or error}" if isinstance(error, OSError) else type(error).__name__


class Unanswered(Exception):
    """A request without an answer; ``Wire`` knows the host and the path."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class Unsent(Broken):
    """The server had closed an idle connection: nothing was sent on it."""


class HostEndpoint(Generic[C]):
    """The hosts of one store, as the pools of both drivers need them."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.request_seconds = hosts.request_seconds
        self.silent: dict[int, float] = {}
        """By host: when a request was sent to it after which it has not answered any."""

    def connection(self, sock: socket.socket, host: int) -> C:
        """The protocol over a socket that is connected to a host."""
        raise NotImplementedError

    async def open(self, world: World, until: float) -> C:
        """Connects to the first host that accepts, starting with the current one. Raises
        ``BackendUnavailable``."""
        sock, host = await self.connect(world, until)
        try:
            return self.connection(sock, host)
        except BaseException:
            sock.close()
            raise

    async def connect(self, world: World, until: float) -> tuple[socket.socket, int]:
        hosts, tried = self.hosts, list[str]()
        for _ in hosts.hosts:
            host = hosts.current
            left = until - now()
            if left <= 0:
                break
            # The last host may use all the time that is left; the others must leave some.
            by = now() + left / (len(hosts.hosts) - len(tried))
            try:
                return await self.connect_to(world, host, by), host
            except (OSError, ValueError) as error:
                if isinstance(error, BackendUnavailable):
                    raise
                tried.append(f"{hosts.name(host)}: {describe(error)}")
                hosts.failed(host)
        raise hosts.unavailable(tried or ["no time was left"])

    async def connect_to(self, world: World, host: int, until: float) -> socket.socket:
        return await open_socket(world, *self.hosts.hosts[host], until, self.hosts.context())

    def failure(self, error: OSError, seconds: float) -> Exception:
        return Unanswered(error)

    def blame(self, host: int, error: OSError) -> None:
        """Leaves a host that broke a connection, or that answers nothing. A busy pool and the short
        deadline of a caller say nothing about the host."""
        if isinstance(error, AllBusy):
            return
        if isinstance(error, TimeoutError):
            host = self.hosts.current  # it has the request, if the host before it refused
            seconds = min(SILENT_SECONDS, self.request_seconds / 2)
            if now() - self.silent.get(host, now()) < seconds:
                return
        self.silent.pop(host, None)
        self.hosts.failed(host)


class HostConnection(Stream):
    """A connection to one of the hosts, with one request at a time."""

    def __init__(self, sock: socket.socket, host: int, endpoint: HostEndpoint[Any]) -> None:
        super().__init__(sock)
        self.host, self.endpoint = host, endpoint
        self._used = now()

    def begin(self) -> None:
        """Before a request is sent. Raises ``Unsent`` if the server has closed the connection."""
        if self.poll is not None and now() - self._used > TRUSTED_IDLE_SECONDS:
            self._check()
        self.endpoint.silent.setdefault(self.host, now())

    def _check(self) -> None:
        """Reads what came while the connection was idle. An event loop has done so already."""
        try:
            if self.poll(0):
                self.collect()
        except OSError as error:
            raise Unsent(f"{error}") from error

    def answered(self, *, unavailable: bool) -> None:
        """After a reply; ``unavailable``: this host can't serve requests now, another one may."""
        hosts = self.endpoint.hosts
        self._used = now()
        self.endpoint.silent.pop(self.host, None)
        if unavailable:  # a node without its leader: another may have one
            hosts.failed(self.host)
        if hosts.current != self.host:  # requests have left it, perhaps during this one
            self.usable = False


class Wire(Generic[R]):
    """Sends requests to the current host, over a pool of connections."""

    def __init__(self, endpoint: HostEndpoint[Any], connections: int, runtime: Runtime) -> None:
        self.endpoint, self.hosts = endpoint, endpoint.hosts
        self._blocking = runtime.blocking
        self._host = self.hosts.current
        self._pool: Any
        if runtime.blocking:
            from holdfast.io.blocking import BlockingPool

            self._pool = BlockingPool(endpoint, connections)
        else:
            from holdfast.io.aio import AsyncPool

            self._pool = AsyncPool(endpoint, connections, pipelined=False)

    async def ask(self, what: bytes, content: bytes = b"", until: float | None = None) -> R:
        """Returns the reply. ``what`` is a path, or a line with one. Raises ``BackendUnavailable``
        if no host can be reached, or if there is no answer."""
        hosts, host = self.hosts, self.hosts.current
        if host != self._host:  # by a reply, or by another backend of the store
            self._host = host
            self._pool.reset()
        try:
            try:
                return await self._send(what, content, until)
            except Unanswered as failed:
                if not isinstance(failed.error, Unsent):
                    raise
                # The pool has closed all its idle connections, and opens another one.
                return await self._send(what, content, until)
        except Unanswered as failed:
            self.endpoint.blame(host, failed.error)
            raise hosts.unknown(host, what, failed.error) from failed.error

    async def _send(self, what: bytes, content: bytes, until: float | None) -> R:
        reply = self._pool.request((what, content), until)
        return reply if self._blocking else await reply  # type: ignore[no-any-return]

    def forget(self) -> None:
        self._pool.forget()

    async def close(self) -> None:
        self._pool.close()
