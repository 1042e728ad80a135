"""HTTP/2 as bytes: a server's frames, cut anywhere, oversized, damaged and hostile."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest
from hpack import Decoder, Encoder

from holdfast.io import http2
from holdfast.io.http2 import Http2, Http2Error, NotHttp2, Stream, header_block

DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
MOST = 2**31 - 1
BLOCK = header_block([(b":method", b"POST"), (b":path", b"/service/Method")])
Frame = tuple[int, int, int, bytes]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def frames(data: bytes) -> list[Frame]:
    """What a client sent, as a server reads it."""
    found = []
    while data:
        size = int.from_bytes(data[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", data[3:9])
        assert len(data) >= 9 + size
        found.append((kind, flags, stream, data[9 : 9 + size]))
        data = data[9 + size :]
    return found


def settings(**values: int) -> bytes:
    names = {"table": 1, "window": 4, "frame": 5}
    pairs = [struct.pack(">HI", names[name], value) for name, value in values.items()]
    return frame(SETTINGS, 0, 0, b"".join(pairs))


def block(*fields: tuple[str, str]) -> bytes:
    """A server's header block: its table has size 0, as the client's settings demand."""
    encoder = Encoder()
    encoder.header_table_size = 0
    return bytes(encoder.encode(list(fields)))


OK = block((":status", "200"), ("content-type", "application/grpc"))
DONE = block(("grpc-status", "0"), ("grpc-message", ""))
REPLY = frame(HEADERS, END_HEADERS, 1, OK) + frame(DATA, 0, 1, b"hello")
REPLY += frame(HEADERS, END_HEADERS | END_STREAM, 1, DONE)


def greeted(**values: int) -> Http2:
    """A connection after the greetings, with nothing left to send."""
    connection = Http2()
    connection.feed(settings(**values))
    connection.take()
    return connection


def asked(**values: int) -> tuple[Http2, Stream]:
    """A connection with one open request, whose bytes were sent."""
    connection = greeted(**values)
    stream = connection.request(BLOCK, b"body")
    connection.take()
    return connection, stream


def test_the_greeting_and_the_first_request_are_one_write() -> None:
    connection = Http2()
    stream = connection.request(BLOCK, b"body")
    sent = connection.take()
    assert sent.startswith(http2.PREFACE)
    first, window, headers, data = frames(sent[len(http2.PREFACE) :])
    assert first[:3] == (SETTINGS, 0, 0)
    chosen = dict(struct.iter_unpack(">HI", first[3]))
    assert chosen[1] == 0  # no header table
    assert chosen[2] == 0  # no push
    assert chosen[4] == MOST
    assert window == (WINDOW, 0, 0, struct.pack(">I", MOST - 65_535))
    assert headers == (HEADERS, END_HEADERS, stream.number, b"\x20" + BLOCK)
    assert data == (DATA, END_STREAM, stream.number, b"body")
    assert connection.take() == b""
    second = connection.request(BLOCK, b"")
    assert [each[2:] for each in frames(connection.take())] == [(3, BLOCK), (3, b"")]
    assert second.number == 3


def test_what_is_encoded_is_read_by_another_library() -> None:
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":path", b"/a/b"),
        (b":authority", b"host:1"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        (b"token", b"x" * 20_000),
        (b"short", b"y" * 126),
        (b"longer", b"y" * 127),
        (b"empty", b""),
    ]
    decoder = Decoder(max_header_list_size=2**20)
    found = list(decoder.decode(b"\x20" + header_block(fields, (b"token",)), raw=True))
    assert [tuple(each) for each in found] == fields
    assert [each.indexable for each in found].index(False) == 6


def test_a_long_header_is_continued() -> None:
    connection = greeted()
    connection.request(header_block([(b"token", b"x" * 40_000)]), b"")
    sent = frames(connection.take())
    assert [each[0] for each in sent] == [HEADERS, CONTINUATION, CONTINUATION, DATA]
    assert [each[1] for each in sent] == [0, 0, END_HEADERS, END_STREAM]
    assert all(len(each[3]) <= 16_384 for each in sent)


def test_a_reply() -> None:
    connection, stream = asked()
    connection.feed(REPLY)
    assert stream.ended
    assert stream.headers is not None
    assert stream.headers[b":status"] == b"200"
    assert stream.take() == b"hello"
    assert stream.trailers is not None
    assert stream.trailers[b"grpc-status"] == b"0"
    assert connection.usable


def test_a_reply_is_the_same_cut_anywhere() -> None:
    noise = settings(window=70_000) + frame(PING, 0, 0, b"12345678") + frame(99, 7, 5, b"unknown")
    whole = noise + REPLY + frame(PRIORITY, 0, 1, b"12345")
    for step in (1, 2, 3, 7, 8, 9, 10, 11):
        connection = Http2()
        stream = connection.request(BLOCK, b"body")
        connection.take()
        for at in range(0, len(whole), step):
            assert not stream.ended or at > len(noise)
            connection.feed(whole[at : at + step])
        assert stream.ended
        assert stream.take() == b"hello"
        answers = frames(connection.take())
        assert answers == [(SETTINGS, ACK, 0, b""), (PING, ACK, 0, b"12345678")]
    for cut in range(len(whole)):
        connection = Http2()
        stream = connection.request(BLOCK, b"body")
        connection.feed(whole[:cut])
        connection.feed(whole[cut:])
        assert stream.ended


def test_a_reply_without_a_body_has_its_trailers_in_the_headers() -> None:
    connection, stream = asked()
    refused = block((":status", "200"), ("grpc-status", "16"), ("grpc-message", "no"))
    connection.feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, refused))
    assert stream.trailers is stream.headers
    assert stream.trailers is not None
    assert stream.trailers[b"grpc-status"] == b"16"


def test_a_body_may_end_a_reply() -> None:
    connection, stream = asked()
    connection.feed(frame(HEADERS, END_HEADERS, 1, OK) + frame(DATA, END_STREAM, 1, b"x"))
    assert stream.trailers == {}


def test_a_header_in_several_frames_with_padding_and_priority() -> None:
    connection, stream = asked()
    padded = b"\x03" + b"\0\0\0\0\x10" + OK[:2] + b"\0\0\0"
    connection.feed(frame(HEADERS, PADDED | WITH_PRIORITY, 1, padded))
    connection.feed(frame(CONTINUATION, 0, 1, OK[2:5]))
    connection.feed(frame(CONTINUATION, 0, 1, b""))
    assert not stream.headers
    connection.feed(frame(CONTINUATION, END_HEADERS, 1, OK[5:]))
    connection.feed(frame(DATA, PADDED | END_STREAM, 1, b"\x02body\0\0"))
    assert stream.take() == b"body"


def test_early_headers_are_followed_by_others() -> None:
    connection, stream = asked()
    connection.feed(frame(HEADERS, END_HEADERS, 1, block((":status", "103"))))
    assert not stream.headers
    connection.feed(REPLY)
    assert stream.take() == b"hello"


def test_a_known_header_block_is_not_decoded_again() -> None:
    http2._decoded.cache_clear()
    for _ in range(5):
        connection, _stream = asked()
        connection.feed(REPLY)
    known = http2._decoded.cache_info()
    assert (known.misses, known.hits) == (2, 8)


def test_a_long_request_waits_for_the_windows() -> None:
    connection = greeted()
    body = bytes(range(256)) * 1000
    stream = connection.request(BLOCK, body)
    sent = frames(connection.take())[1:]
    assert sum(len(each[3]) for each in sent) == 65_535
    assert all(len(each[3]) <= 16_384 for each in sent)
    assert all(each[:3] == (DATA, 0, 1) for each in sent)
    connection.feed(frame(WINDOW, 0, 0, struct.pack(">I", 200_000)))
    assert connection.take() == b""  # the stream's own window is still used up
    connection.feed(frame(WINDOW, 0, 1, struct.pack(">I", 1)))
    sent += frames(connection.take())
    assert len(sent[-1][3]) == 1
    connection.feed(settings(window=300_000, frame=100_000))
    ack, *more = frames(connection.take())
    assert ack == (SETTINGS, ACK, 0, b"")
    sent += more
    assert b"".join(each[3] for each in sent) == body
    assert [each[1] for each in sent[:-1]] == [0] * (len(sent) - 1)
    assert sent[-1][1] == END_STREAM
    assert max(len(each[3]) for each in sent) == 100_000
    assert stream.window == 300_000 - len(body) + 1


def test_a_smaller_window_holds_what_is_sent_next() -> None:
    connection = greeted(window=10)
    stream = connection.request(BLOCK, b"1234", end=False)
    connection.take()
    connection.feed(settings(window=3))  # less than was used: the window is negative
    assert stream.window == -1
    connection.take()
    connection.send(stream, b"56")
    connection.send(stream, b"7", end=True)
    assert connection.take() == b""
    connection.feed(frame(WINDOW, 0, 1, struct.pack(">I", 3)))
    connection.feed(frame(WINDOW, 0, 1, struct.pack(">I", 1)))
    sent = frames(connection.take())
    assert [each[1:] for each in sent] == [(0, 1, b"56"), (END_STREAM, 1, b"7")]


def test_a_reply_may_come_before_the_request_was_sent_whole() -> None:
    connection = greeted(window=10)
    stream = connection.request(BLOCK, b"x" * 100)
    connection.take()
    connection.feed(REPLY)
    assert stream.ended
    connection.feed(frame(WINDOW, 0, 0, struct.pack(">I", 100)))
    assert connection.take() == b""


def test_a_request_that_the_server_does_not_take_has_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http2, "MOST_BODY_BYTES", 1000)
    connection = greeted(window=0)
    stream = connection.request(BLOCK, b"x" * 900, end=False)
    connection.send(stream, b"x" * 900)
    with pytest.raises(Http2Error, match="does not take"):
        connection.send(stream, b"x")


def test_our_windows_are_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "REFILL_BYTES", 30_000)
    connection, stream = asked()
    connection.feed(frame(HEADERS, END_HEADERS, 1, OK))
    for _ in range(2):
        connection.feed(frame(DATA, PADDED, 1, b"\x05" + b"x" * 15_994 + b"\0" * 5))
    more = struct.pack(">I", 32_000)
    assert frames(connection.take()) == [(WINDOW, 0, 0, more), (WINDOW, 0, 1, more)]
    assert stream.take() == b"x" * 31_988
    connection.feed(frame(DATA, END_STREAM, 1))
    for _ in range(2):  # of a stream that has ended: the connection's window is used all the same
        connection.feed(frame(DATA, 0, 1, b"x" * 16_000))
    assert frames(connection.take()) == [(WINDOW, 0, 0, more)]


def test_a_reset_ends_its_stream_alone() -> None:
    connection, stream = asked()
    other = connection.request(BLOCK, b"")
    connection.feed(frame(RST, 0, 1, struct.pack(">I", 8)))
    assert (stream.reset, stream.ended) == (8, True)
    assert not other.ended
    connection.feed(REPLY)  # late frames of a stream that has ended
    connection.feed(frame(RST, 0, 1, struct.pack(">I", 8)))
    connection.feed(REPLY.replace(b"\0\0\0\x01", b"\0\0\0\x03"))
    assert other.take() == b"hello"


def test_a_goodbye_ends_the_streams_that_the_server_does_not_serve() -> None:
    connection, stream = asked()
    other = connection.request(BLOCK, b"")
    connection.feed(frame(GOAWAY, 0, 0, struct.pack(">II", MOST, 0)))
    assert not connection.usable
    assert not other.ended
    connection.feed(frame(GOAWAY, 0, 0, struct.pack(">II", 1, 0) + b"some text"))
    assert other.reset is not None
    assert not stream.ended
    connection.feed(REPLY)
    assert stream.take() == b"hello"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n<html>",
        b"-ERR unknown command\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46\x00\x00",  # a TLS alert
        frame(SETTINGS, ACK, 0),
        frame(PING, 0, 0, b"12345678"),
        frame(SETTINGS, 0, 1),
    ],
)
def test_a_server_of_another_kind(answer: bytes) -> None:
    connection = Http2()
    connection.request(BLOCK, b"")
    with pytest.raises(NotHttp2):
        connection.feed(answer)


BROKEN: dict[str, bytes] = {
    "a frame that is too long, from its first bytes on": frame(99, 0, 0, b"x" * 16_385)[:9],
    "data of the connection": frame(DATA, 0, 0, b"x"),
    "data before headers": frame(DATA, 0, 1, b"x"),
    "data of a stream that was not opened": frame(DATA, 0, 3, b"x"),
    "headers of a stream of the server's own": frame(HEADERS, END_HEADERS, 2, OK),
    "headers of the connection": frame(HEADERS, END_HEADERS, 0, OK),
    "a header that can't be decoded": frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff"),
    "a header with an index of a table": frame(HEADERS, END_HEADERS, 1, b"\xbe"),
    "a header table of another size": frame(HEADERS, END_HEADERS, 1, b"\x3f\xe1\x1f" + OK[1:]),
    "a header with priority that is too short": frame(HEADERS, WITH_PRIORITY, 1, b"123"),
    "too much padding": frame(HEADERS, END_HEADERS, 1, OK) + frame(DATA, PADDED, 1, b"\x02a"),
    "padding without a length": frame(HEADERS, PADDED, 1, b""),
    "another frame in a header": frame(HEADERS, 0, 1, OK) + frame(PING, 0, 0, b"12345678"),
    "a header continued elsewhere": frame(HEADERS, 0, 1, OK) + frame(CONTINUATION, 4, 3, b""),
    "a continuation alone": frame(CONTINUATION, END_HEADERS, 1, OK),
    "headers in a body": frame(HEADERS, END_HEADERS, 1, OK) * 2,
    "a push": frame(PUSH, END_HEADERS, 1, struct.pack(">I", 2) + OK),
    "a short reset": frame(RST, 0, 1, b"12"),
    "a reset of the connection": frame(RST, 0, 0, b"1234"),
    "a reset of a stream that was not opened": frame(RST, 0, 5, b"1234"),
    "settings of a stream": frame(SETTINGS, 0, 1),
    "settings of a wrong length": frame(SETTINGS, 0, 0, b"12345"),
    "a confirmation with settings": frame(SETTINGS, ACK, 0, b"123456"),
    "a frame size that is too small": settings(frame=16_383),
    "a frame size that is too large": settings(frame=2**24),
    "a first window that is too large": settings(window=2**31),
    "a ping of a stream": frame(PING, 0, 1, b"12345678"),
    "a short ping": frame(PING, 0, 0, b"1234567"),
    "a goodbye of a stream": frame(GOAWAY, 0, 1, b"12345678"),
    "a short goodbye": frame(GOAWAY, 0, 0, b"1234"),
    "a window that does not grow": frame(WINDOW, 0, 0, b"\0\0\0\0"),
    "a stream's window that does not grow": frame(WINDOW, 0, 1, b"\0\0\0\0"),
    "a window that is too large": frame(WINDOW, 0, 0, struct.pack(">I", MOST)),
    "a stream's window that is too large": frame(WINDOW, 0, 1, struct.pack(">I", MOST)),
    "a window of a wrong length": frame(WINDOW, 0, 0, b"123"),
    "a window of a stream that was not opened": frame(WINDOW, 0, 3, b"\0\0\0\1"),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_breaks_the_protocol_is_an_error(data: bytes) -> None:
    connection, _ = asked()
    with pytest.raises(Http2Error):
        connection.feed(data)


def _headers_without_end(connection: Http2) -> None:
    connection.feed(frame(HEADERS, 0, 1, b"x" * 16_000))
    connection.feed(frame(CONTINUATION, 0, 1, b"x" * 1000))


def _empty_parts_without_end(connection: Http2) -> None:
    connection.feed(frame(HEADERS, 0, 1))
    connection.feed(frame(CONTINUATION, 0, 1) * 5000)


def _many_fields(connection: Http2) -> None:
    """Few bytes that stand for many."""
    connection.feed(frame(HEADERS, END_HEADERS, 1, b"\x82" * 16_000))


def _a_long_number(connection: Http2) -> None:
    connection.feed(frame(HEADERS, END_HEADERS, 1, b"\xff" * 16_384))


def _pings_without_end(connection: Http2) -> None:
    connection.feed(frame(PING, 0, 0, b"12345678") * 10_000)


def _settings_without_end(connection: Http2) -> None:
    connection.feed(settings() * 10_000)


def _a_body_without_end(connection: Http2) -> None:
    connection.feed(frame(HEADERS, END_HEADERS, 1, OK))
    piece = frame(DATA, 0, 1, b"x" * 16_384)
    for _ in range(64 * 2**20 // 16_384 + 1):
        connection.feed(piece)


@pytest.mark.parametrize(
    "send",
    [
        _headers_without_end,
        _empty_parts_without_end,
        _many_fields,
        _a_long_number,
        _pings_without_end,
        _settings_without_end,
        _a_body_without_end,
    ],
)
def test_what_has_no_end_is_an_error(send: Callable[[Http2], None]) -> None:
    connection, _ = asked()
    with pytest.raises(Http2Error):
        send(connection)


def test_replies_that_are_sent_may_be_many() -> None:
    """Only those that wait to be sent have a limit."""
    connection, _ = asked()
    for _ in range(20):
        connection.feed(frame(PING, 0, 0, b"12345678") * 1000)
        assert len(frames(connection.take())) == 1000


def test_replies_that_the_driver_could_not_send_still_count() -> None:
    connection, _ = asked()
    for _ in range(3):
        connection.feed(frame(PING, 0, 0, b"12345678") * 1000)
        assert connection.take(b"unsent")
    with pytest.raises(Http2Error, match="does not read"):
        connection.feed(frame(PING, 0, 0, b"12345678") * 1000)


def test_a_long_body_that_is_taken_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "MOST_BODY_BYTES", 20_000)
    connection, stream = asked()
    connection.feed(frame(HEADERS, END_HEADERS, 1, OK))
    for _ in range(10):
        connection.feed(frame(DATA, 0, 1, b"x" * 16_000))
        assert len(stream.take()) == 16_000
    connection.feed(frame(DATA, 0, 1, b"x" * 16_000))
    with pytest.raises(Http2Error, match="too long"):
        connection.feed(frame(DATA, 0, 1, b"x" * 16_000))


def test_damaged_bytes_are_an_error_or_a_reply() -> None:
    """Whatever byte is damaged, no other exception comes out."""
    whole = frame(PING, 0, 0, b"12345678") + REPLY
    chance = random.Random(7)
    for _ in range(5000):
        connection, _ = asked()
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(whole))] = chance.randrange(256)
        try:
            for at in range(0, len(damaged), 13):
                connection.feed(bytes(damaged[at : at + 13]))
        except Http2Error:
            continue
