"""One connection without a server: replies byte by byte, to other requests, after its end."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.io.clock import now
from holdfast.stores.zookeeper.client.completion import BlockingCompletion
from holdfast.stores.zookeeper.client.connection import SharedConnection
from holdfast.stores.zookeeper.client.greeting import ZooKeeperStream
from holdfast.stores.zookeeper.client.packets import (
    ConnectionLost,
    Delete,
    Exists,
    Read,
    pack_text,
)

SOON = 60.0
STAT = struct.pack("!qqqqiiiqiiq", *range(11))


class Listener:
    """Notes what a connection reports."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.ends = 0

    def node_changed(self, path: str) -> None:
        self.changed.append(path)

    def disconnected(self, connection: SharedConnection) -> None:
        self.ends += 1


class Pair:
    """A connection, and the other end of its socket."""

    def __init__(self) -> None:
        inside, self.server = socket.socketpair()
        self.listener = Listener()
        self.connection = SharedConnection(ZooKeeperStream(inside), self.listener)

    def reply(self, xid: int, code: int = 0, body: bytes = b"") -> None:
        frame = struct.pack("!iqi", xid, 5, code) + body
        self.server.sendall(struct.pack("!i", len(frame)) + frame)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.connection.end(OSError(0, "the test is over"))
    made.server.close()


def test_replies_come_in_order(pair: Pair) -> None:
    first, second = Exists("/a"), Delete("/b")
    pair.connection.send([first, second])
    pair.reply(1, 0, STAT)
    pair.reply(-1, 0, struct.pack("!ii", 2, 3) + pack_text("/watched"))
    pair.reply(2, -101)
    pair.connection.collect()
    assert first.value.pzxid == 10
    assert second.error is not None
    assert pair.listener.changed == ["/watched"]
    assert pair.connection.zxid == 5


@pytest.mark.parametrize("xid", [2, 77, -2])
def test_a_reply_to_another_request_ends_the_connection(pair: Pair, xid: int) -> None:
    """It is unknown which request it answers: all outcomes are unknown."""
    requests = [Exists("/a"), Exists("/b")]
    pair.connection.send(requests)
    pair.reply(xid, 0, STAT)
    pair.connection.collect()
    assert pair.connection.over
    assert pair.listener.ends == 1
    for request in requests:
        assert isinstance(request.error, ConnectionLost)
        assert request.value is None


def test_a_reply_without_a_request_ends_the_connection(pair: Pair) -> None:
    pair.reply(1, 0, STAT)
    pair.connection.collect()
    assert pair.connection.over


@pytest.mark.parametrize("size", [1, 3, 19])
def test_a_reply_in_pieces(pair: Pair, size: int) -> None:
    request = Exists("/a")
    pair.connection.send([request])
    frame = struct.pack("!iqi", 1, 5, 0) + STAT
    data = struct.pack("!i", len(frame)) + frame
    for start in range(0, len(data), size):
        assert request.value is None
        pair.server.sendall(data[start : start + size])
        pair.connection.collect()
    assert request.value.czxid == 0


def test_the_end_of_the_stream_fails_what_is_pending(pair: Pair) -> None:
    """Also a request that is sent later; a wait ends at once."""
    completion, late = BlockingCompletion(), Exists("/b")
    request = Exists("/a")
    request.completion = completion
    pair.connection.send([request])
    pair.server.close()
    assert pair.connection.wait(completion, now() + SOON)
    pair.connection.send([late])
    for each in (request, late):
        assert isinstance(each.error, ConnectionLost)


def test_a_signal_handler_sends_in_the_middle_of_a_request(pair: Pair) -> None:
    """The server must not take the handler's request for the rest of the other."""
    stream: Any = pair.connection._stream
    write, nested, request = stream._write, Exists("/b"), Exists("/a")

    def write_and_handle(data: bytes) -> int:
        stream._write = write
        sent: int = write(data[:5])
        pair.connection.send([nested])
        return sent

    stream._write = write_and_handle
    pair.connection.send([request])
    assert pair.connection.over
    for each in (request, nested):
        assert isinstance(each.error, ConnectionLost)
    assert len(pair.server.recv(1000)) == 5
    assert pair.server.recv(1000) == b""


def test_a_signal_handler_reads_in_the_middle_of_a_reply(pair: Pair) -> None:
    """It must not take the rest of the reply for another one."""
    stream: Any = pair.connection._stream
    recv, request = stream._recv, Read("/a")
    inner = struct.pack("!iqi", 1, 5, 0) + struct.pack("!i", 5) + b"wrong" + STAT
    data = struct.pack("!i", len(inner)) + inner
    frame = struct.pack("!iqi", 1, 5, 0) + struct.pack("!i", len(data)) + data + STAT
    reply = struct.pack("!i", len(frame)) + frame
    start = reply.index(data)

    def recv_and_handle(size: int) -> bytes:
        stream._recv = recv
        received: bytes = recv(size)
        pair.server.sendall(reply[start:])
        pair.connection.collect()
        return received

    pair.connection.send([request])
    pair.server.sendall(reply[:start])
    stream._recv = recv_and_handle
    pair.connection.collect()
    assert pair.connection.over
    assert isinstance(request.error, ConnectionLost)
    assert request.value is None
