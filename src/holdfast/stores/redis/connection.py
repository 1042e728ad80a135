"""What both Redis wires share: packing, addresses, access, and the mapping of foreign errors.

redis-py opens every connection (TCP, TLS, UNIX sockets, AUTH, SELECT, credential providers) and
then hands its socket over: from there on commands are packed ahead and replies are read by
hiredis, without redis-py's pool, retries or metrics. ``redis_blocking`` and ``redis_aio`` talk to
one node each; ``redis_topology`` knows which node.
"""

from __future__ import annotations

import socket
from binascii import crc_hqx
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.retry import Retry

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.resp import INCOMPLETE, Reader, Refused, TimedSocket

__all__ = [
    "FIRST_WORD",
    "INCOMPLETE",
    "Access",
    "Address",
    "Greeting",
    "LinkBroken",
    "Reader",
    "Refused",
    "bulk",
    "key_slot",
    "link_options",
    "node_address",
    "pack",
    "unreachable",
]

SLOTS = 16_384
TRIFLE_SECONDS = 0.05
"""Not worth a timeout of its own."""


class LinkBroken(BackendUnavailable):
    """A connection broke or was too slow: whether the server acted is unknown."""

    def __init__(self, message: str, *, closed: bool) -> None:
        super().__init__(message)
        self.closed = closed
        """Whether the other side closed or refused it: another try costs little then."""


class Address(NamedTuple):
    """A node: host and port, or the path of a UNIX socket with port 0."""

    host: str
    port: int

    def __str__(self) -> str:
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def node_address(host: str, port: str) -> Address:
    """A node as another one names it; ``BackendUnavailable`` if that is no address."""
    if not host or not port.isdecimal() or len(port) > 5:
        raise BackendUnavailable(f"not the address of a node: {host[:100]!r} {port[:10]!r}")
    return Address(host, int(port))


class Greeting(NamedTuple):
    """What every new connection is asked first, and who judges the reply."""

    packed: bytes
    judge: Callable[[Any], None]


def bulk(text: str) -> str:
    """One packed argument."""
    size = len(text) if text.isascii() else len(text.encode())
    return f"${size}\r\n{text}\r\n"


def pack(*words: str | int) -> bytes:
    """One packed command."""
    return f"*{len(words)}\r\n{''.join(bulk(str(word)) for word in words)}".encode()


FIRST_WORD = pack("TIME")
"""Sent in front of a command that tells others something, so that its reply comes behind that. A
server writes last to whom it first had something to say: those who are told run while we wait,
instead of waiting while we run on. The reply to this one is dropped, whatever it is."""


def key_slot(key: str) -> int:
    """The Cluster slot of a key."""
    data = key.encode()
    start = data.find(b"{")
    if start >= 0:
        end = data.find(b"}", start + 1)
        if end > start + 1:
            data = data[start + 1 : end]
    return crc_hqx(data, 0) % SLOTS


# What of a user's own client says where and as whom to connect; the rest is how it behaves.
_TAKEN = frozenset({"db", "username", "password", "credential_provider", "client_name"})


def link_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those settings of a redis-py connection that concern access: login, database, TLS."""
    return {
        key: value
        for key, value in options.items()
        if value is not None and (key in _TAKEN or key.startswith("ssl_"))
    }


# A subscription may be silent for hours: the kernel finds out in half a minute if it is dead.
_KEEP_ALIVE = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}


class Access:
    """How to open a connection to any node: plain or TLS, as whom, to which database."""

    def __init__(self, *, tls: bool, options: dict[str, Any], request_seconds: float) -> None:
        self.tls = tls
        self.options = options
        self.request_seconds = request_seconds

    def seconds_until(self, until: float | None) -> float:
        """How long a request may take that must be over by then."""
        if until is None:
            return self.request_seconds
        return max(0.001, min(self.request_seconds, until - now()))

    def in_a_hurry(self, until: float) -> bool:
        """Whether that is sooner than every request has to be over, by more than a trifle."""
        return until - now() < self.request_seconds - TRIFLE_SECONDS

    def _arguments(self, address: Address, seconds: float) -> dict[str, Any]:
        where: dict[str, Any] = {"host": address.host, "port": address.port}
        if not address.port:
            where = {"path": address.host}
        else:
            where |= {"socket_keepalive": True, "socket_keepalive_options": _KEEP_ALIVE}
        options = self.options
        if not self.tls or not address.port:
            options = {key: value for key, value in options.items() if not key.startswith("ssl_")}
        return (
            where
            | options
            | {
                "socket_timeout": seconds,
                "socket_connect_timeout": seconds,
                "retry": Retry(NoBackoff(), 0),
                "protocol": 2,
                "decode_responses": False,
            }
        )

    def blocking(self, address: Address, seconds: float) -> Any:
        """A redis-py connection, not open yet; it is open, and logged in, in so many seconds."""
        import redis

        arguments = self._arguments(address, seconds)
        maker: Any = redis.SSLConnection if self.tls else redis.Connection
        if not address.port:
            maker = redis.UnixDomainSocketConnection
        connection = maker(**arguments)
        dial, by = connection._connect, now() + seconds
        connection._connect = lambda: TimedSocket(dial(), by)
        return connection

    def aio(self, address: Address, seconds: float) -> Any:
        """Its asyncio twin."""
        import redis.asyncio as aio

        arguments = self._arguments(address, seconds)
        maker: Any = aio.SSLConnection if self.tls else aio.Connection
        if not address.port:
            maker = aio.UnixDomainSocketConnection
        return maker(**arguments)


def unreachable(address: Address, error: BaseException, seconds: float) -> LinkBroken:
    """The error for a failed connection or request; foreign texts hold no secrets here."""
    closed = isinstance(error, EOFError | ConnectionResetError | BrokenPipeError)
    if isinstance(error, TimeoutError | BlockingIOError):
        return LinkBroken(f"redis at {address} did not answer within {seconds:g} s", closed=False)
    if isinstance(error, RedisError):
        # Exactly this class: its subclasses are about logging in, which another try won't mend.
        closed = type(error) is RedisConnectionError
        return LinkBroken(f"redis at {address} can't be used: {error}", closed=closed)
    what = str(error) or type(error).__name__
    return LinkBroken(f"the connection to redis at {address} broke: {what}", closed=closed)


def chunks(commands: Iterable[bytes], size: int) -> Iterable[list[bytes]]:
    """Commands in batches, so that neither side's buffers grow without bound."""
    batch: list[bytes] = []
    for command in commands:
        batch.append(command)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
