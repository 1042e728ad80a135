"""The frames of a WebSocket, in whatever pieces they come."""

from __future__ import annotations

import itertools

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, Ping, TextMessage

from holdfast.wires.http import Servers
from holdfast.wires.websocket import Frames

TEXTS = ["", "a", "ä" * 60, "b" * 125, "c" * 126, "d" * 70_000, "e"]


class Server:
    """The other side."""

    def __init__(self, frames: Frames) -> None:
        self._wire = WSConnection(ConnectionType.SERVER)
        self._wire.receive_data(frames.hello)
        list(self._wire.events())
        self.greeting = self._wire.send(AcceptConnection())

    def say(self, *events: TextMessage | Ping) -> bytes:
        return b"".join(self._wire.send(event) for event in events)


@pytest.fixture
def frames() -> Frames:
    hosts = (("localhost", 1),)
    return Frames(Servers("etcd://localhost:1", hosts, tls=None, request_seconds=1.0), 0, "/")


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 3, 4096, 1_000_000])
def test_messages_come_whole_and_in_order(frames: Frames, size: int) -> None:
    """Also those that come right behind the greeting."""
    server = Server(frames)
    said = server.greeting + server.say(*(TextMessage(data=text) for text in TEXTS))
    heard = itertools.chain.from_iterable(map(frames.feed, _pieces(said, size)))
    assert list(heard) == TEXTS
    assert frames.open


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
def test_parts_and_pings_between_them(frames: Frames, size: int) -> None:
    """A message in parts is one message; a ping is answered wherever it comes."""
    server = Server(frames)
    frames.feed(server.greeting)
    said = server.say(
        TextMessage(data="one "),
        TextMessage(data="two ", message_finished=False),
        Ping(payload=b"?"),
        TextMessage(data="three", message_finished=True),
        TextMessage(data="four"),
    )
    heard = itertools.chain.from_iterable(map(frames.feed, _pieces(said, size)))
    assert list(heard) == ["one ", "two three", "four"]
    assert frames.replies


@pytest.mark.parametrize(
    "said", [b"\x81\x81abcde", b"\x81\x01\xff", b"\xf1\x01a", b"\x88\x00", b""]
)
def test_what_is_no_message_ends_the_connection(frames: Frames, said: bytes) -> None:
    """A frame that is masked, no text, or of a kind that was not agreed on; a goodbye; an end."""
    server = Server(frames)
    frames.feed(server.greeting)
    with pytest.raises(ConnectionResetError):
        frames.feed(said)


def test_a_message_inside_another_ends_the_connection(frames: Frames) -> None:
    server = Server(frames)
    frames.feed(server.greeting + server.say(TextMessage(data="half", message_finished=False)))
    with pytest.raises(ConnectionResetError):
        frames.feed(b"\x81\x01a")


def test_nothing_is_said_after_the_end(frames: Frames) -> None:
    """One thread reads that it is over, and another still has something to say."""
    frames.feed(Server(frames).greeting)
    assert frames.text("before")
    with pytest.raises(OSError, match="closed"):
        frames.feed(b"")
    with pytest.raises(OSError, match="over"):
        frames.text("after")
