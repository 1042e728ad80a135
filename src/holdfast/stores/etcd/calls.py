"""gRPC calls to etcd: their bytes, a pool of connections, sign-in, and refusals as exceptions.

A call is one HTTP/2 request (``io.http2``): its body is one message behind five bytes, and its
status is in the trailers of the reply. A connection of the pool has one call at a time. Calls go to
the current host until it fails, then to the next one. No PING is ever sent: etcd ends connections
that send many.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable
from holdfast.io import http2
from holdfast.io.connection import PENDING, Broken, World
from holdfast.io.http2 import Http2, NotHttp2, header_block
from holdfast.stores._consensus.hosts import HostConnection, HostEndpoint, Hosts, Wire
from holdfast.stores._consensus.sessions import RuntimeLock
from holdfast.stores.etcd import messages
from holdfast.stores.etcd.messages import Damaged, TxnReply, damaged, shown

__all__ = [
    "Call",
    "Calls",
    "Credentials",
    "Endpoint",
    "FinalRefusal",
    "NoSpace",
    "Reply",
    "SessionGone",
    "Wire",
]

T = TypeVar("T")

MOST_MESSAGE_BYTES = http2.MOST_BODY_BYTES
_PREFIX = struct.Struct(">BI")
"""Before every message: whether it is compressed, and its length."""
OK, UNIMPLEMENTED, LAST_STATUS = 0, 12, 16
_HOST_TROUBLE = frozenset((2, 4, UNIMPLEMENTED, 13, 14, 15))
"""gRPC's statuses of a node that can't serve requests: unknown, deadline exceeded, unimplemented,
internal, unavailable, data loss. Another node may."""
_HTTP_TROUBLE = 500
"""From here on, HTTP's statuses of a host that can't serve requests: a proxy's."""
_FOR_A_MOMENT = (408, 429)
"""HTTP's statuses of a refusal that is not final: timeout, too many requests."""
_OLD_TOKEN = (
    b"invalid auth token",
    b"user name is empty",
    b"revision in header is old",  # of a signed token, after any change of users or roles
    b"revision of auth store is old",
    b"permission denied",  # the token may be older than the permission
)
"""Refusals of requests whose token may be too old: it is fetched again once."""


class Call(NamedTuple, Generic[T]):
    """One method of etcd's API."""

    path: bytes
    read: Callable[[bytes], T]
    """Reads its reply; raises ``Damaged``."""


RANGE = Call(b"/etcdserverpb.KV/Range", messages.range_reply)
DELETE = Call(b"/etcdserverpb.KV/DeleteRange", messages.delete_reply)
TXN = Call(b"/etcdserverpb.KV/Txn", messages.txn_reply)
GRANT = Call(b"/etcdserverpb.Lease/LeaseGrant", messages.grant_reply)
REVOKE = Call(b"/etcdserverpb.Lease/LeaseRevoke", messages.empty_reply)
KEEP_ALIVE = Call(b"/etcdserverpb.Lease/LeaseKeepAlive", messages.lease_reply)
TIME_TO_LIVE = Call(b"/etcdserverpb.Lease/LeaseTimeToLive", messages.lease_reply)
STATUS = Call(b"/etcdserverpb.Maintenance/Status", messages.status_reply)
SIGN_IN = Call(b"/etcdserverpb.Auth/Authenticate", messages.token_reply)
WATCH = b"/etcdserverpb.Watch/Watch"


class SessionGone(Exception):
    """The lease of a request has ended; the request changed nothing."""


class NoSpace(BackendUnavailable):
    """The database is full and accepts only deletes; the request changed nothing."""


class FinalRefusal(BackendUnavailable):
    """A refusal that is final: a retry would not help. The request changed nothing."""

    def __init__(self, message: str) -> None:
        super().__init__(message, final=True)


class Credentials:
    """User and password of one store, and the token they were last exchanged for."""

    def __init__(self, user: str | None, password: str | None) -> None:
        self.user, self.password = user, password
        self.sign_ins = 0
        """Number of sign-ins so far. A refused request that was sent before the latest sign-in is
        repeated without another one."""
        self.signed: tuple[bytes, dict[tuple[int, bytes], bytes]] = b"", {}
        """The token, and the header blocks that were made with it, by host and path."""

    def use(self, token: str) -> None:
        """Sends this token with all later requests; "" for none."""
        # One assignment: other threads see the token and the headers with it, or neither.
        self.signed = token.encode(), {}

    def __repr__(self) -> str:
        return f"Credentials({self.user!r})"


class Reply(NamedTuple):
    """The end of one call."""

    status: int
    """gRPC's status; or HTTP's, of a reply that is not gRPC's."""
    body: bytes
    """The message; the text of the refusal if the status is not ``OK``."""

    @property
    def unavailable(self) -> bool:
        """Whether this host can't serve requests now: another one may."""
        return self.status in _HOST_TROUBLE or self.status >= _HTTP_TROUBLE


def framed(message: bytes) -> bytes:
    return _PREFIX.pack(0, len(message)) + message


def unframed(data: bytearray) -> list[bytes]:
    """Takes the complete messages out of received data. Raises ``OSError`` if these are none."""
    found = []
    while len(data) >= _PREFIX.size:
        compressed, size = _PREFIX.unpack_from(data)
        if compressed or size > MOST_MESSAGE_BYTES:
            raise Broken("it sent a message that is compressed, or too long")
        end = _PREFIX.size + size
        if len(data) < end:
            break
        found.append(bytes(data[_PREFIX.size : end]))
        del data[:end]
    return found


def _status(fields: Mapping[bytes, bytes]) -> int | None:
    text = fields.get(b"grpc-status", b"")
    return int(text) if text.isdigit() and len(text) < 4 else None


def refusal_text(fields: Mapping[bytes, bytes]) -> bytes:
    """The text in the trailers of a call that failed: bytes beyond ASCII are written ``%XX``."""
    text = fields.get(b"grpc-message", b"")
    return re.sub(rb"%([0-9a-fA-F]{2})", lambda found: bytes((int(found[1], 16),)), text)


def reply_of(call: http2.Stream) -> Reply:
    """The reply of a call that has ended. Raises ``OSError`` if the server has broken it off."""
    if call.reset is not None or call.headers is None or call.trailers is None:
        raise Broken(f"it broke off the request (code {call.reset})")
    http = call.headers.get(b":status", b"")
    status = _status(call.trailers)
    if status is None or http != b"200":
        return Reply(int(http) if http.isdigit() and len(http) == 3 else _HTTP_TROUBLE, b"")
    if status != OK:
        return Reply(status, refusal_text(call.trailers))
    data = call.take()
    if len(data) < _PREFIX.size or _PREFIX.unpack_from(data) != (0, len(data) - _PREFIX.size):
        return Reply(OK, b"\0")  # no message: it can't be read
    return Reply(OK, data[_PREFIX.size :])


class Endpoint(HostEndpoint["GrpcConnection"]):
    """The hosts of one store, and the headers of its calls."""

    def __init__(self, hosts: Hosts, credentials: Credentials) -> None:
        super().__init__(hosts)
        self.credentials = credentials

    def connection(self, sock: socket.socket, host: int) -> GrpcConnection:
        return GrpcConnection(sock, host, self)

    async def connect_to(self, world: World, host: int, until: float) -> socket.socket:
        sock = await super().connect_to(world, host, until)
        if self.hosts.tls:
            agreed = sock.selected_alpn_protocol()  # type: ignore[attr-defined]
            if agreed != self.hosts.alpn:
                sock.close()
                raise ConnectionRefusedError(0, "the server does not offer HTTP/2 (ALPN)")
        return sock

    def block(self, host: int, path: bytes, *, bare: bool = False) -> bytes:
        """The header block of a call. It is made once for each token. ``bare``: without it."""
        token, blocks = (b"", {}) if bare else self.credentials.signed
        block = blocks.get((host, path))
        if block is None:
            block = blocks[host, path] = self._block(host, path, token)
        return block

    def _block(self, host: int, path: bytes, token: bytes) -> bytes:
        fields = [
            (b":method", b"POST"),
            (b":scheme", b"https" if self.hosts.tls else b"http"),
            (b":path", path),
            (b":authority", self.hosts.authorities[host]),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        ]
        if path == WATCH:  # a node that loses its leader ends the call: it would see no events
            fields.append((b"hasleader", b"true"))
        if token:
            fields.append((b"token", token))
        return header_block(fields, secret=(b"token",))


class GrpcConnection(HostConnection):
    """One connection of a pool, with one call at a time: a request is a path and a message."""

    endpoint: Endpoint

    def __init__(self, sock: socket.socket, host: int, endpoint: Endpoint) -> None:
        super().__init__(sock, host, endpoint)
        self._http2 = Http2()
        self._call: http2.Stream | None = None

    def send(self, request: tuple[bytes, bytes]) -> None:  # type: ignore[override]
        path, message = request
        self.begin()
        # An expired token would be refused even by the request for a new one.
        block = self.endpoint.block(self.host, path, bare=path == SIGN_IN.path)
        self._call = self._http2.request(block, framed(message))
        super().send(self._http2.take(self.unsent))

    def send_all(self, requests: Sequence[Any]) -> None:
        (request,) = requests
        self.send(request)

    def feed(self, data: bytes) -> None:
        self._http2.feed(data)
        if not self._http2.usable:
            self.usable = False
            if self._call is None:
                raise Broken("the server closes the connection", closed=True)
        # After the reply, replies to pings wait for the next request: a write costs more.
        if (self._call is None or not self._call.ended) and (more := self._http2.take(self.unsent)):
            super().send(more)

    def next(self) -> Any:
        call = self._call
        if call is None or not call.ended:
            return PENDING
        self._call = None
        reply = reply_of(call)
        self.answered(unavailable=reply.unavailable)
        return reply


class Calls:
    """The calls of one backend."""

    def __init__(self, wire: Wire[Reply], credentials: Credentials, runtime: Runtime) -> None:
        self.wire, self.credentials = wire, credentials
        self._runtime, self._signing_in = runtime, RuntimeLock(runtime)
        self.hosts, self.display = wire.hosts, wire.hosts.display

    async def call(self, call: Call[T], message: bytes, until: float | None = None) -> T:
        """Returns the reply. Raises ``SessionGone``, ``NoSpace`` or ``FinalRefusal`` if nothing was
        changed, and ``BackendUnavailable`` if the outcome is unknown."""
        await self.signed_in(until)
        known = self.credentials.sign_ins
        reply = await self._ask(call.path, message, until)
        if reply.status != OK:
            if self._wants_sign_in(reply):
                await self.sign_in(known, until)
                reply = await self._ask(call.path, message, until)
            if reply.status != OK:
                raise self._refusal(call.path, reply)
        return self._read(call, reply)

    async def _ask(self, path: bytes, message: bytes, until: float | None) -> Reply:
        try:
            return await self.wire.ask(path, message, until)
        except BackendUnavailable as error:
            if isinstance(error.__cause__, NotHttp2) and not self.hosts.known:
                raise FinalRefusal(f"{error}: it is not etcd, or older than 3.4") from None
            raise

    def _read(self, call: Call[T], reply: Reply) -> T:
        try:
            answer = call.read(reply.body)
        except Damaged as error:
            if self.hosts.known:  # it may have executed the request
                raise damaged(self.display, error) from None
            raise FinalRefusal(f"{damaged(self.display, error)}: it is not etcd") from None
        if isinstance(answer, TxnReply):
            answer.where = self.display
        self.hosts.known = True
        return answer

    def _wants_sign_in(self, reply: Reply) -> bool:
        refused = any(text in reply.body for text in _OLD_TOKEN)
        return refused and bool(self.credentials.user)

    async def signed_in(self, until: float | None) -> None:
        """Signs in, if that is needed and was not done yet."""
        if self.credentials.user and not self.credentials.sign_ins:
            await self.sign_in(0, until)

    async def sign_in(self, known: int, until: float | None) -> None:
        """Exchanges user and password for a token, unless there were more than ``known`` sign-ins
        by now: one of many threads or tasks signs in for all. Raises ``BackendUnavailable``."""
        by = self._runtime.now() + self.hosts.request_seconds
        by = by if until is None else min(by, until)
        try:
            async with self._signing_in.hold(by):
                if known == self.credentials.sign_ins:
                    await self._sign_in(by)
        except TimeoutError:
            raise BackendUnavailable(f"{self.display}: no sign-in was possible in time") from None

    async def _sign_in(self, until: float) -> None:
        credentials = self.credentials
        message = messages.sign_in(credentials.user or "", credentials.password or "")
        reply = await self._ask(SIGN_IN.path, message, until)
        if reply.status != OK:
            if b"authentication is not enabled" in reply.body:
                credentials.use("")
                credentials.sign_ins += 1
                return
            raise self._refusal(SIGN_IN.path, reply)
        credentials.use(self._read(SIGN_IN, reply))
        credentials.sign_ins += 1

    def forget(self) -> None:
        self._signing_in.forget()
        self.wire.forget()

    def _refusal(self, path: bytes, reply: Reply) -> Exception:
        text, what = shown(reply.body), path.decode()
        if "requested lease not found" in text:
            return SessionGone()
        if not self.hosts.known and _is_another_server(reply.status):
            return FinalRefusal(
                f"{self.display}: {what}: status {reply.status}: the server answers HTTP/2, but "
                "not as etcd: it is a proxy or another server, or etcd is older than 3.4"
            )
        denial = self._denial(what, text)
        if denial:
            return FinalRefusal(f"{self.display} {denial}")
        kind = NoSpace if "database space exceeded" in text else BackendUnavailable
        return kind(f"{self.display}: {what}: {text or f'status {reply.status}'}")

    def _denial(self, what: str, text: str) -> str:
        user = self.credentials.user
        if "invalid user ID or password" in text:
            return f"refused the password of {user!r}" if user else "needs a user and a password"
        if "user name is empty" in text and not user:  # with a user, a node lags behind another
            return "needs a user and a password"
        if "permission denied" in text:
            return f"refuses {what} to the user {user!r}: its role lacks the permission"
        return ""


def _is_another_server(status: int) -> bool:
    """Whether a refusal shows that the server is not etcd, if no server was known as etcd yet."""
    return status == UNIMPLEMENTED or (
        LAST_STATUS < status < _HTTP_TROUBLE and status not in _FOR_A_MOMENT
    )
