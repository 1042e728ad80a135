"""How a connection to a ZooKeeper server begins: its session, and who we are.

The packets are pure; the exchange of them is written once, over a ``World``.
"""

from __future__ import annotations

import socket
import ssl
import struct
from base64 import b64encode
from contextlib import suppress
from functools import partial
from hashlib import sha1
from typing import Any, NamedTuple

from holdfast.io.connection import Broken, Stream, World, exchange, open_socket
from holdfast.stores.zookeeper.client.packets import (
    ANYBODY,
    Acl,
    AuthFailed,
    Close,
    Frames,
    Header,
    pack_text,
    read_header,
)

__all__ = [
    "NO_SESSION",
    "Access",
    "DigestAccess",
    "Greeting",
    "SaslAccess",
    "SessionId",
    "ZooKeeperStream",
    "connect",
    "open_stream",
    "pack_connect",
    "pack_sasl",
    "read_greeting",
    "read_sasl",
    "shortest_session",
]

MOST_GREETING_BYTES = 65_536
"""The largest reply that is accepted before a session is granted."""
MOST_CHALLENGES = 8
_CONNECT = struct.Struct("!iqiqi16s?")
_GREETING = struct.Struct("!iiqi16s")
_REQUEST = struct.Struct("!ii")
_INT = struct.Struct("!i")
_AUTH, _AUTH_XID = 100, -4
_SASL = 102
_SASL_HOST = "zk-sasl-md5"
"""ZooKeeper's fixed name for all servers, in DIGEST-MD5."""


class SessionId(NamedTuple):
    """What a server needs to know a session again, after a lost connection."""

    number: int
    password: bytes


NO_SESSION = SessionId(0, bytes(16))


class Greeting(NamedTuple):
    """A server's first reply: the session that it granted."""

    timeout_ms: int
    """0 if the session that was asked for has expired."""
    session: SessionId
    read_only: bool


def _framed(body: bytes) -> bytes:
    return _INT.pack(len(body)) + body


def pack_connect(zxid: int, timeout_ms: int, session: SessionId) -> bytes:
    """Asks for a new session, or for a known one. Never for a read-only one: a server that is cut
    off from the majority then refuses the connection."""
    return _framed(_CONNECT.pack(0, zxid, timeout_ms, session.number, 16, session.password, False))


def read_greeting(frame: bytes) -> Greeting:
    """Raises ``Broken`` if it is none. Old servers leave the last byte out."""
    if len(frame) not in (_GREETING.size, _GREETING.size + 1):
        raise Broken(f"not ZooKeeper's: a greeting of {len(frame)} bytes")
    version, timeout_ms, number, length, password = _GREETING.unpack_from(frame)
    if version != 0 or timeout_ms < 0 or length != 16:
        raise Broken("not ZooKeeper's: a greeting that can't be read")
    return Greeting(timeout_ms, SessionId(number, password), frame[_GREETING.size :] == b"\1")


def pack_auth(scheme: str, credential: bytes) -> bytes:
    body = _INT.pack(0) + pack_text(scheme) + _INT.pack(len(credential)) + credential
    return _framed(_REQUEST.pack(_AUTH_XID, _AUTH) + body)


def pack_sasl(xid: int, token: bytes) -> bytes:
    return _framed(_REQUEST.pack(xid, _SASL) + _framed(token))


def read_sasl(body: bytes) -> bytes:
    """The server's next challenge. Raises ``Broken`` if it is none."""
    length = _INT.unpack_from(body)[0] if len(body) >= 4 else -1
    if length == -1 and len(body) == 4:
        return b""
    if length != len(body) - 4:
        raise Broken("not ZooKeeper's: a challenge that can't be read")
    return body[4:]


class Access:
    """Who we are: nobody in particular."""

    acl: tuple[Acl, ...] = (ANYBODY,)
    """The access list of our nodes."""

    async def prove(self, world: World, stream: Stream, until: float) -> None:
        """Authenticates a connection. Raises ``AuthFailed`` if the server refuses that."""


class DigestAccess(Access):
    """A user and password that only the nodes' access lists name: no server checks them."""

    def __init__(self, username: str, password: str) -> None:
        self._credential = f"{username}:{password}".encode()
        hashed = b64encode(sha1(self._credential, usedforsecurity=False).digest()).decode()
        self.acl = (Acl("digest", f"{username}:{hashed}"),)

    async def prove(self, world: World, stream: Stream, until: float) -> None:
        packet = pack_auth("digest", self._credential)
        header, _ = await _reply(world, stream, packet, until)
        if header.code:
            raise AuthFailed


class SaslAccess(Access):
    """A user and password that the servers know: DIGEST-MD5, by the package ``pure-sasl``."""

    def __init__(self, username: str, password: str, service: str) -> None:
        from puresasl.client import SASLClient  # here: an import would delay the event loop later

        self._client = partial(
            SASLClient, _SASL_HOST, service, "DIGEST-MD5", username=username, password=password
        )
        self.acl = (Acl("sasl", username),)

    async def prove(self, world: World, stream: Stream, until: float) -> None:
        client = self._client()
        challenge: bytes | None = None
        for xid in range(1, MOST_CHALLENGES + 1):
            response = _respond(client, challenge)
            if client.complete and not response:
                client.dispose()
                return
            try:
                header, body = await _reply(world, stream, pack_sasl(xid, response), until)
            except Broken as error:  # not final: a server that stops does the same
                text = f"{error} during SASL (some servers do so for a wrong password)"
                raise Broken(text) from error
            if header.code:
                raise AuthFailed
            challenge = read_sasl(body)
        raise AuthFailed


def _respond(client: Any, challenge: bytes | None) -> bytes:
    try:
        return client.process(challenge) or b""
    except Exception as error:  # whatever the package makes of a damaged challenge
        raise AuthFailed from error


class ZooKeeperStream(Stream):
    """Frames over one socket."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.frames = Frames(MOST_GREETING_BYTES)
        self.feed, self.next = self.frames.feed, self.frames.next

    def shut(self) -> None:
        """Ends the connection, and with it every wait for the descriptor, which stays open."""
        with suppress(OSError):
            # Not the method of ``ssl.SSLSocket``: another thread may be using its TLS object.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)


async def open_stream(
    world: World, host: str, port: int, tls: ssl.SSLContext | None, until: float
) -> ZooKeeperStream:
    """Connects to a server, without a session. Raises ``OSError``."""
    return ZooKeeperStream(await open_socket(world, host, port, until, tls))


async def _reply(world: World, stream: Stream, packet: bytes, until: float) -> tuple[Header, bytes]:
    (frame,) = await exchange(world, stream, [packet], until)
    try:
        return read_header(frame)
    except struct.error:
        raise Broken(f"not ZooKeeper's: a reply of {len(frame)} bytes") from None


async def connect(
    world: World, stream: Stream, zxid: int, timeout_ms: int, session: SessionId, until: float
) -> Greeting:
    """Asks for a session. Raises ``OSError``."""
    packet = pack_connect(zxid, timeout_ms, session)
    (frame,) = await exchange(world, stream, [packet], until)
    greeting = read_greeting(frame)
    if greeting.read_only:
        raise Broken("the server is read-only: it is cut off from the majority")
    return greeting


async def shortest_session(world: World, stream: Stream, until: float) -> float:
    """Requests a session of one millisecond and ends it; the server grants its minimum, in seconds.

    That is two ticks unless ``minSessionTimeout`` is set. There is no other way to find out.
    """
    greeting = await connect(world, stream, 0, 1, NO_SESSION, until)
    stream.send(Close().pack(1))
    return greeting.timeout_ms / 1000
