"""Answers that no ZooKeeper gives: the connection ends, within bounds of time and memory."""

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
from stores.fake_server import Talk, fake_server

PATIENCE = 1.0
MORE_THAN_ENOUGH = 200 * 2**20
SOON = 20.0
SHORTEST_MS = 1000


def _hello(asked: bytes) -> bytes:
    """The answer to a client's first words: the session that it asks for."""
    _, _, _, milliseconds = struct.unpack_from("!iiqi", asked)
    granted = max(SHORTEST_MS, milliseconds)
    return struct.pack("!iiiqi16s?", 37, 0, granted, 7, 16, b"", False)


def _answer(length: int, xid: int, code: int = 0, body: bytes = b"") -> bytes:
    return struct.pack("!iiqi", length, xid, 1, code) + body


def _greeted(reply: bytes) -> Talk:
    """Lets the client in, and answers all that it asks then with the same bytes."""

    def talk(wire: socket.socket) -> None:
        wire.sendall(_hello(wire.recv(65_536)))
        while wire.recv(65_536):
            wire.sendall(reply)

    return talk


def _refused(port: int, flavour: Flavour) -> None:
    url = f"zookeeper://127.0.0.1:{port}"

    async def run() -> None:
        async with holdfast.connect_async(url, patience=PATIENCE, ttl=8) as locks:
            with pytest.raises(BackendUnavailable):
                await locks.lock("name", timeout=PATIENCE).acquire()

    if flavour is Flavour.ASYNCIO:
        asyncio.run(run())
        return
    with (
        holdfast.connect(url, patience=PATIENCE, ttl=8) as locks,
        pytest.raises(BackendUnavailable),
    ):
        locks.lock("name", timeout=PATIENCE).acquire()


HELLOS = {
    "huge": struct.pack("!i", 2**31 - 1),
    "negative": struct.pack("!i", -4),
    "short": struct.pack("!i", 2) + b"ab",
    "noise": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS)
def test_a_greeting_that_is_not_zookeeper_s(hello: bytes, flavour: Flavour) -> None:
    """It announces more than anything has, and keeps sending: nobody takes it in."""
    sent: list[int] = []

    def talk(wire: socket.socket) -> None:
        wire.recv(65_536)
        wire.sendall(hello)
        while sum(sent) < MORE_THAN_ENOUGH:
            sent.append(wire.send(b"x" * 65_536))

    begun = now()
    with fake_server(talk) as port:
        _refused(port, flavour)
    assert now() - begun < SOON
    assert sum(sent) < MORE_THAN_ENOUGH


ANSWERS = {
    "huge": _answer(2**31 - 1, 1),
    "negative, a ping": _answer(-4, -2),
    "negative": _answer(-4, 1),
    "without its head": _answer(4, -2),
    "an unknown error": _answer(16, 1, -9999),
    "an event that is none": _answer(28, -1, 0, struct.pack("!iii", 1, 3, 2**31 - 1)),
    "an event without text": _answer(17, -1, 0, b"\xff"),
    "an event of no text": _answer(30, -1, 0, struct.pack("!iii", 1, 3, 2) + b"\xff\xff"),
    "another's": _answer(16, 77),
}


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_is_not_zookeeper_s(answer: bytes, flavour: Flavour) -> None:
    begun = now()
    with fake_server(_greeted(answer)) as port:
        _refused(port, flavour)
    assert now() - begun < SOON


def test_a_greeting_that_drips_is_given_up() -> None:
    """For the next server, or another try. kazoo allows its whole time for every byte."""
    over, again = threading.Event(), threading.Event()
    wires: list[socket.socket] = []

    def drip(wire: socket.socket) -> None:
        wires.append(wire)
        if len(wires) > 1:
            again.set()
        for letter in _hello(wire.recv(65_536)):
            wire.sendall(bytes([letter]))
            if over.wait(0.4):
                return

    with fake_server(drip) as port:
        with holdfast.connect(f"zookeeper://127.0.0.1:{port}", patience=1, ttl=8) as locks:
            with pytest.raises(BackendUnavailable):
                locks.lock("name", timeout=1).acquire()
            assert again.wait(SOON / 2)
        over.set()


@pytest.mark.parametrize("length", [4, 15, 2**31 - 1])
def test_an_answer_has_a_head_and_an_end(length: int) -> None:
    """Whoever reads on behind one that has not would read anything as the next answer."""

    class Socket:
        unread, over = b"", False

        def take(self) -> bytes:
            return _answer(length, -2, body=b"x" * 40)

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
    """It is an error of the request, and of nothing else."""
    sent.pack(1)
    sent.complete(0, body)
    assert sent.error is not None
    assert caplog.records
