"""The frames of a WebSocket, received in pieces of any size."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from functools import partial

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, Ping, TextMessage

from holdfast.io.http import Servers
from holdfast.stores.etcd import aio, websocket
from holdfast.stores.etcd.aio import AsyncWebSocket
from holdfast.stores.etcd.websocket import Frames

TEXTS = ["", "a", "ä" * 60, "b" * 125, "c" * 126, "d" * 70_000, "e"]


class Server:
    """The server's side of the protocol."""

    def __init__(self, frames: Frames) -> None:
        self._protocol = WSConnection(ConnectionType.SERVER)
        self._protocol.receive_data(frames.hello)
        list(self._protocol.events())
        self.greeting = self._protocol.send(AcceptConnection())

    def send(self, *events: TextMessage | Ping) -> bytes:
        return b"".join(self._protocol.send(event) for event in events)


@pytest.fixture
def frames() -> Frames:
    hosts = (("localhost", 1),)
    return Frames(Servers("etcd://localhost:1", hosts, tls=None, request_seconds=1.0), 0, "/")


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 3, 4096, 1_000_000])
def test_messages_come_whole_and_in_order(frames: Frames, size: int) -> None:
    """Also those that follow the greeting at once."""
    server = Server(frames)
    sent = server.greeting + server.send(*(TextMessage(data=text) for text in TEXTS))
    received = itertools.chain.from_iterable(map(frames.feed, _pieces(sent, size)))
    assert list(received) == TEXTS
    assert frames.open


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
def test_parts_and_pings_between_them(frames: Frames, size: int) -> None:
    """A message in parts is one message; a ping between the parts is answered."""
    server = Server(frames)
    frames.feed(server.greeting)
    sent = server.send(
        TextMessage(data="one "),
        TextMessage(data="two ", message_finished=False),
        Ping(payload=b"?"),
        TextMessage(data="three", message_finished=True),
        TextMessage(data="four"),
    )
    received = itertools.chain.from_iterable(map(frames.feed, _pieces(sent, size)))
    assert list(received) == ["one ", "two three", "four"]
    assert frames.replies


@pytest.mark.parametrize(
    "sent", [b"\x81\x81abcde", b"\x81\x01\xff", b"\xf1\x01a", b"\x88\x00", b""]
)
def test_data_that_is_no_message_ends_the_connection(frames: Frames, sent: bytes) -> None:
    """A masked frame, invalid text, an extension that was not agreed on, a close frame, the end."""
    server = Server(frames)
    frames.feed(server.greeting)
    with pytest.raises(ConnectionResetError):
        frames.feed(sent)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x81\x7f" + (2**40).to_bytes(8, "big"),
        b"\x81\x7f" + (2**63 + 1).to_bytes(8, "big"),
        b"\x89\x7e\xff\xff" + b"x" * 65_535,
    ],
    ids=["a terabyte", "more than there is", "a long ping"],
)
def test_a_message_that_is_too_long_is_not_waited_for(frames: Frames, sent: bytes) -> None:
    frames.feed(Server(frames).greeting)
    with pytest.raises(ConnectionResetError):
        frames.feed(sent)


def test_parts_that_are_too_long_together_end_the_connection(frames: Frames) -> None:
    frames.feed(Server(frames).greeting)
    part = (2**20).to_bytes(8, "big") + b"x" * 2**20
    frames.feed(b"\x01\x7f" + part)
    for _ in range(14):
        frames.feed(b"\x00\x7f" + part)
    with pytest.raises(ConnectionResetError, match="too long"):
        frames.feed(b"\x00\x7f" + part)


def test_parts_without_anything_in_them_have_an_end(
    frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part takes memory until the message is complete."""
    monkeypatch.setattr(websocket, "MOST_MESSAGE_BYTES", 10_000)
    frames.feed(Server(frames).greeting)
    frames.feed(b"\x01\x00")
    with pytest.raises(ConnectionResetError, match="too long"):
        frames.feed(b"\x00\x00" * 1000)


def test_a_server_that_reads_no_answers_to_its_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffered replies are bounded."""
    monkeypatch.setattr(aio, "MOST_MESSAGE_BYTES", 100_000)
    asyncio.run(_ping_without_end())


async def _ping_without_end() -> None:
    servers = Servers("etcd://localhost:1", (("localhost", 1),), tls=None, request_seconds=1.0)
    ours, theirs = socket.socketpair()
    with theirs:
        make = partial(AsyncWebSocket, "/", servers, 0)
        _, web = await asyncio.get_running_loop().create_connection(make, sock=ours)
        web.data_received(Server(web._frames).greeting)
        for _ in range(20_000):
            web.data_received(b"\x89\x7d" + b"?" * 125)
            if web.over:
                break
        assert web.over
        assert web.transport.get_write_buffer_size() < 200_000
        web.close()


def test_a_long_message_takes_time_for_its_length(frames: Frames) -> None:
    """Not quadratic: received data is not copied again for every piece."""
    frames.feed(Server(frames).greeting)
    size, piece = 4 * 2**20, 1024
    frames.feed(b"\x81\x7f" + size.to_bytes(8, "big"))
    begun = time.process_time()
    received = [message for _ in range(size // piece) for message in frames.feed(b"x" * piece)]
    assert [len(message) for message in received] == [size]
    assert time.process_time() - begun < 2.0


GREETING = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
DAMAGED = [
    b"\x00" * 100,
    b"HTTP/1.1 101 x\r\n\r\n",
    b"HTTP/1.1 999999999999999999999 x\r\n\r\n",
    GREETING + b"Sec-WebSocket-Accept: \xff\xfe\r\n\r\n",
    GREETING + b"Sec-WebSocket-Protocol: other\r\nSec-WebSocket-Accept: x\r\n\r\n",
    GREETING + b"Sec-WebSocket-Extensions: \xff; x=\xfe\r\n\r\n",
    GREETING + b"Upgrade: \xff\r\n\r\n",
    GREETING + b"X: " + b"y" * 70_000,
]


@pytest.mark.parametrize("sent", DAMAGED, ids=range(len(DAMAGED)))
@pytest.mark.parametrize("size", [7, 1_000_000])
def test_an_invalid_greeting_ends_the_connection(frames: Frames, sent: bytes, size: int) -> None:
    pieces = _pieces(sent, size)
    with pytest.raises(OSError, match="WebSocket"):
        list(map(frames.feed, pieces))
    assert not frames.open


def test_a_message_inside_another_ends_the_connection(frames: Frames) -> None:
    server = Server(frames)
    frames.feed(server.greeting + server.send(TextMessage(data="half", message_finished=False)))
    with pytest.raises(ConnectionResetError):
        frames.feed(b"\x81\x01a")


def test_nothing_is_sent_after_the_end(frames: Frames) -> None:
    """One thread reads the end of the connection while another one still sends."""
    frames.feed(Server(frames).greeting)
    assert frames.text("before")
    with pytest.raises(OSError, match="closed"):
        frames.feed(b"")
    with pytest.raises(OSError, match="over"):
        frames.text("after")
