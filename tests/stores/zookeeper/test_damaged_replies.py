"""Replies that no ZooKeeper server sends end the connection, within bounds of time and memory."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import pytest

import holdfast
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.testing import Flavour
from stores.fake_server import ConnectionHandler, fake_server

REQUEST_SECONDS = 1.0
MORE_THAN_ENOUGH = 200 * 2**20
SOON = 20.0
SHORTEST_MS = 1000
CREATE, LISTING, SYNC = 15, 8, 9
STAT = struct.pack("!qqqqiiiqiiq", 7, 7, 1, 1, 0, 0, 0, 7, 0, 0, 7)


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


def _refused(port: int, flavour: Flavour) -> str:
    """Acquires a lock, which fails; returns the error."""
    url = f"zookeeper://127.0.0.1:{port}"

    async def run() -> str:
        async with holdfast.connect_async(url, patience=REQUEST_SECONDS, ttl=8) as locks:
            with pytest.raises(BackendUnavailable) as caught:
                await locks.lock("name", timeout=REQUEST_SECONDS).acquire()
        return str(caught.value)

    if flavour is Flavour.ASYNCIO:
        return asyncio.run(run())
    with (
        holdfast.connect(url, patience=REQUEST_SECONDS, ttl=8) as locks,
        pytest.raises(BackendUnavailable) as caught,
    ):
        locks.lock("name", timeout=REQUEST_SECONDS).acquire()
    return str(caught.value)


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


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_create_answered_with_another_path(flavour: Flavour) -> None:
    """It is no name of a node: the error is the store's, not a ``ValueError``."""

    def serve(sock: socket.socket) -> None:
        sock.sendall(_hello(sock.recv(65_536)))
        requests = sock.makefile("rb")
        while len(head := requests.read(12)) == 12:
            length, xid, kind = struct.unpack("!iii", head)
            sent = requests.read(length - 8)
            path = struct.pack("!i", 6) + b"nopath" + STAT
            body = {CREATE: path, LISTING: struct.pack("!i", 0), SYNC: sent}.get(kind, STAT)
            sock.sendall(_reply(16 + len(body), xid, 0, body))

    with fake_server(serve) as port:
        assert "nopath" in _refused(port, flavour)


def test_a_greeting_byte_by_byte_times_out() -> None:
    """The client tries again: the deadline does not begin anew with every byte."""
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
        begun = now()
        with holdfast.connect(f"zookeeper://127.0.0.1:{port}", ttl=8) as locks:
            with pytest.raises(BackendUnavailable):
                locks.lock("name", timeout=6).acquire()
            assert again.is_set()
        assert now() - begun < SOON
        over.set()


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_read_only_server_is_refused(flavour: Flavour) -> None:
    """It is cut off from the majority: what it shows proves nothing."""

    def serve(sock: socket.socket) -> None:
        sock.sendall(_hello(sock.recv(65_536))[:-1] + b"\1")
        sock.recv(65_536)

    with fake_server(serve) as port:
        assert "read-only" in _refused(port, flavour)
