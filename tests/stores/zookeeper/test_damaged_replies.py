"""Replies that no ZooKeeper server sends end the connection, within bounds of time and memory."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from typing import Any

import pytest

import holdfast
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores.zookeeper.client.connection import ZooKeeperConnection
from holdfast.stores.zookeeper.client.packets import Checks, Create, Listing, Multi, Read, Write
from holdfast.testing import Flavour
from stores.fake_server import ConnectionHandler, fake_server

REQUEST_SECONDS = 1.0
MORE_THAN_ENOUGH = 200 * 2**20
SOON = 20.0
SHORTEST_MS = 1000


def _hello(greeting: bytes) -> bytes:
    """The reply to a client's greeting: grants the session timeout that it requests."""
    _, _, _, milliseconds = struct.unpack_from("!iiqi", greeting)
    granted = max(SHORTEST_MS, milliseconds)
    return struct.pack("!iiiqi16s?", 37, 0, granted, 7, 16, b"", False)


def _reply(length: int, xid: int, code: int = 0, body: bytes = b"") -> bytes:
    return struct.pack("!iiqi", length, xid, 1, code) + body


def _greeted(reply: bytes) -> ConnectionHandler:
    """Grants a session, then answers every request with the same bytes."""

    def serve(sock: socket.socket) -> None:
        sock.sendall(_hello(sock.recv(65_536)))
        while sock.recv(65_536):
            sock.sendall(reply)

    return serve


def _refused(port: int, flavour: Flavour) -> None:
    url = f"zookeeper://127.0.0.1:{port}"

    async def run() -> None:
        async with holdfast.connect_async(url, patience=REQUEST_SECONDS, ttl=8) as locks:
            with pytest.raises(BackendUnavailable):
                await locks.lock("name", timeout=REQUEST_SECONDS).acquire()

    if flavour is Flavour.ASYNCIO:
        asyncio.run(run())
        return
    with (
        holdfast.connect(url, patience=REQUEST_SECONDS, ttl=8) as locks,
        pytest.raises(BackendUnavailable),
    ):
        locks.lock("name", timeout=REQUEST_SECONDS).acquire()


HELLOS = {
    "huge": struct.pack("!i", 2**31 - 1),
    "negative": struct.pack("!i", -4),
    "short": struct.pack("!i", 2) + b"ab",
    "noise": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS)
def test_a_greeting_that_is_not_zookeeper_s(hello: bytes, flavour: Flavour) -> None:
    """A greeting that announces a huge length, and keeps sending, is not read into memory."""
    sent: list[int] = []

    def serve(sock: socket.socket) -> None:
        sock.recv(65_536)
        sock.sendall(hello)
        while sum(sent) < MORE_THAN_ENOUGH:
            sent.append(sock.send(b"x" * 65_536))

    begun = now()
    with fake_server(serve) as port:
        _refused(port, flavour)
    assert now() - begun < SOON
    assert sum(sent) < MORE_THAN_ENOUGH


REPLIES = {
    "huge": _reply(2**31 - 1, 1),
    "negative, a ping": _reply(-4, -2),
    "negative": _reply(-4, 1),
    "without its header": _reply(4, -2),
    "an unknown error": _reply(16, 1, -9999),
    "an event of a wrong length": _reply(28, -1, 0, struct.pack("!iii", 1, 3, 2**31 - 1)),
    "an event without text": _reply(17, -1, 0, b"\xff"),
    "an event of invalid text": _reply(30, -1, 0, struct.pack("!iii", 1, 3, 2) + b"\xff\xff"),
    "to another request": _reply(16, 77),
}


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
def test_a_reply_that_is_not_zookeeper_s(reply: bytes, flavour: Flavour) -> None:
    begun = now()
    with fake_server(_greeted(reply)) as port:
        _refused(port, flavour)
    assert now() - begun < SOON


def test_a_greeting_byte_by_byte_times_out() -> None:
    """The client tries again. kazoo itself would restart its timeout with every byte."""
    over, again = threading.Event(), threading.Event()
    sockets: list[socket.socket] = []

    def drip(sock: socket.socket) -> None:
        sockets.append(sock)
        if len(sockets) > 1:
            again.set()
        for letter in _hello(sock.recv(65_536)):
            sock.sendall(bytes([letter]))
            if over.wait(0.4):
                return

    with fake_server(drip) as port:
        with holdfast.connect(f"zookeeper://127.0.0.1:{port}", patience=1, ttl=8) as locks:
            with pytest.raises(BackendUnavailable):
                locks.lock("name", timeout=1).acquire()
            assert again.wait(SOON / 2)
        over.set()


@pytest.mark.parametrize("length", [4, 15, 2**31 - 1])
def test_the_length_of_a_reply_is_checked(length: int) -> None:
    """Behind a reply of a wrong length, any bytes would be read as the next reply."""

    class Socket:
        unread, over = b"", False

        def take(self) -> bytes:
            return _reply(length, -2, body=b"x" * 40)

    connection: Any = ZooKeeperConnection.__new__(ZooKeeperConnection)
    connection._socket, connection.ping_outstanding = Socket(), threading.Event()
    with pytest.raises(ConnectionAbortedError, match=f"{length} bytes"):
        connection.read()


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (Listing("/"), struct.pack("!i", 2**31 - 1)),
        (Listing("/"), struct.pack("!i", -1)),
        (Listing("/"), struct.pack("!ii", 1, -5)),
        (Read("/"), struct.pack("!i", 2**31 - 1)),
        (Create("/", b"", b""), struct.pack("!i", -1)),
        (Write("/", b""), b""),
        (Multi([]), b""),
        (Checks(["/"]), struct.pack("!iBi", -1, 0, -9999) + struct.pack("!i", -9999)),
    ],
)
def test_a_body_that_is_not_zookeeper_s(
    sent: Listing, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the request fails."""
    sent.pack(1)
    sent.complete(0, body)
    assert sent.error is not None
    assert caplog.records
