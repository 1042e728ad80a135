"""HTTP/2, the client's half of one connection: bytes in, bytes out, no socket, thread or clock.

A small part of RFC 9113 is enough for one client of one server: no push, no priorities, and no PING
of our own. Our windows are opened to their maximum at once, so that the server may send as much as
``MOST_BODY_BYTES`` allows; the server's windows are respected. Both sides use a header table of
size 0, so a header block means the same at any time. Blocks that we send can be made once, and a
block that was received before is not decoded again.

A driver sends what ``take`` returns, gives received bytes to ``feed``, and then looks at ``take``
again, since ``feed`` may have something to send: replies to pings, or more of a long request.

What a server sends is not trusted: every frame is checked, everything that is kept has a limit, and
bytes that break the protocol raise ``Http2Error``. After an error the connection can't be used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from hpack import Decoder, HPACKError

__all__ = ["Http2", "Http2Error", "NotHttp2", "Stream", "header_block"]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
ACK = END_STREAM = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20
TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW, FRAME_SIZE, HEADER_LIST_SIZE = 1, 2, 4, 5, 6
REFUSED_STREAM = 7

HEAD_BYTES = 9
FRAME_BYTES = 16_384
"""The longest payload that a server may send, and the longest that we send without its leave."""
LARGEST_FRAME_SIZE = 2**24 - 1
FIRST_WINDOW = 65_535
LARGEST_WINDOW = 2**31 - 1
REFILL_BYTES = 2**30
"""A window of ours is opened again after so many bytes."""
LAST_STREAM = 2**31 - 1
MOST_HEADER_BYTES = 16_384
"""The longest header block, which may have several frames; also the size of its decoded fields."""
MOST_BODY_BYTES = 64 * 2**20
"""The longest body of a reply; for an endless one, the longest part that was not taken."""
MOST_ANSWER_BYTES = 65_536
"""How much may wait to be sent in reply to the server's own frames."""
KNOWN_BLOCKS = 64

_HEAD = struct.Struct(">IBI")
"""Length and kind of a frame, its flags, its stream."""
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_TABLE_SIZE_0 = b"\x20"
"""Comes before the first header block: our table has no entries."""


class Http2Error(ConnectionResetError):
    """The server broke the protocol, or a limit."""

    def __init__(self, message: str) -> None:
        super().__init__(0, message)


class NotHttp2(Http2Error):
    """The first bytes are not those of an HTTP/2 server."""


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


_SETTINGS = {
    TABLE_SIZE: 0,
    ENABLE_PUSH: 0,
    INITIAL_WINDOW: LARGEST_WINDOW,
    HEADER_LIST_SIZE: MOST_HEADER_BYTES,
}
_GREETING = b"".join(
    (
        PREFACE,
        _frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in _SETTINGS.items())),
        _frame(WINDOW_UPDATE, 0, 0, _NUMBER.pack(LARGEST_WINDOW - FIRST_WINDOW)),
    )
)

_INDEXED = {(b":method", b"POST"): b"\x83", (b":scheme", b"http"): b"\x86"}
_INDEXED[b":scheme", b"https"] = b"\x87"
_INDEXED_NAMES = {b":authority": b"\x01", b":path": b"\x04", b"content-type": b"\x0f\x10"}


def header_block(fields: Iterable[tuple[bytes, bytes]], secret: tuple[bytes, ...] = ()) -> bytes:
    """Encodes header fields. Proxies must not remember the values of those in ``secret``."""
    return b"".join(_field(name, value, name in secret) for name, value in fields)


def _field(name: bytes, value: bytes, secret: bool) -> bytes:
    if (name, value) in _INDEXED:
        return _INDEXED[name, value]
    kind = b"\x10" if secret else b"\x00"
    start = _INDEXED_NAMES.get(name) or kind + _length(name) + name
    return start + _length(value) + value


def _length(text: bytes) -> bytes:
    """The length of a text, as a number with a prefix of seven bits."""
    left = len(text)
    if left < 0x7F:
        return bytes((left,))
    encoded, left = bytearray(b"\x7f"), left - 0x7F
    while left >= 0x80:
        encoded.append(left & 0x7F | 0x80)
        left >>= 7
    encoded.append(left)
    return bytes(encoded)


@lru_cache(KNOWN_BLOCKS)
def _decoded(block: bytes) -> Mapping[bytes, bytes]:
    """The fields of a header block. A server has few different ones."""
    decoder = Decoder(MOST_HEADER_BYTES)
    decoder.header_table_size = decoder.max_allowed_table_size = 0
    try:
        return {bytes(name): bytes(value) for name, value in decoder.decode(block, raw=True)}
    except (HPACKError, IndexError, ValueError) as error:
        raise Http2Error(f"a header that can't be read ({type(error).__name__})") from None


class Stream:
    """One request and its reply."""

    __slots__ = ("_body", "_size", "headers", "number", "received", "reset", "trailers", "window")

    def __init__(self, number: int, window: int) -> None:
        self.number = number
        self.window = window
        """How many bytes the server allows us to send."""
        self.headers: Mapping[bytes, bytes] | None = None
        self.trailers: Mapping[bytes, bytes] | None = None
        """Not None once the reply is complete. Those of a reply without a body are its headers."""
        self.reset: int | None = None
        """The code with which the server has refused or ended the stream."""
        self._body: list[bytes] = []
        self._size = 0
        self.received = 0
        """Bytes that count against our window."""

    @property
    def ended(self) -> bool:
        return self.trailers is not None or self.reset is not None

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MOST_BODY_BYTES:
            raise Http2Error("the response is too long")
        if data:
            self._body.append(data)

    def take(self) -> bytes:
        """The part of the body that was received since the last call."""
        body, self._body, self._size = self._body, [], 0
        return body[0] if len(body) == 1 else b"".join(body)


class Http2:
    """One connection. Any number of streams; its user looks at each after ``feed``."""

    def __init__(self) -> None:
        self._outgoing = bytearray(_GREETING)
        self._answers = 0
        """How many bytes of what is to be sent reply to the server's own frames."""
        self._rest = b""
        """The start of an incomplete frame."""
        self._greeted = False
        self._block: tuple[int, int, list[bytes]] | None = None
        """Stream, flags and start of a header block that CONTINUATION frames go on with."""
        self._block_size = 0
        self._next_stream = 1
        self._first_block = _TABLE_SIZE_0
        self._streams: dict[int, Stream] = {}
        self._unsent: dict[int, tuple[bytearray, bool]] = {}
        """By stream: what the server's windows did not allow yet, and whether it is the end."""
        self._window, self._stream_window = FIRST_WINDOW, FIRST_WINDOW
        self._frame_size = FRAME_BYTES
        self._received = 0
        self.going_away = False

    @property
    def usable(self) -> bool:
        """Whether another stream can be opened."""
        return not self.going_away and self._next_stream <= LAST_STREAM

    # Sending.

    def take(self, unsent: bytes = b"") -> bytes:
        """What is to be sent now. ``unsent``: what the driver could not send yet. Replies to the
        server's frames may be in it, so they still count."""
        outgoing = bytes(self._outgoing)
        self._outgoing.clear()
        if not unsent:
            self._answers = 0
        return outgoing

    def request(self, block: bytes, body: bytes, *, end: bool = True) -> Stream:
        """Opens a stream with an encoded header block. Without ``end``, ``send`` may follow."""
        number = self._next_stream
        self._next_stream += 2
        if self._first_block:
            block, self._first_block = self._first_block + block, b""
        stream = self._streams[number] = Stream(number, self._stream_window)
        first, rest = block[:FRAME_BYTES], block[FRAME_BYTES:]
        flags = 0 if rest else END_HEADERS
        self._outgoing += _HEAD.pack(len(first) << 8 | HEADERS, flags, number) + first
        while rest:
            first, rest = rest[:FRAME_BYTES], rest[FRAME_BYTES:]
            self._outgoing += _frame(CONTINUATION, 0 if rest else END_HEADERS, number, first)
        if body or end:
            self.send(stream, body, end=end)
        return stream

    def send(self, stream: Stream, data: bytes, *, end: bool = False) -> None:
        """Sends more of a request, as soon as the server's windows allow it."""
        waiting = self._unsent.get(stream.number)
        if waiting is not None:
            if len(waiting[0]) > MOST_BODY_BYTES:
                raise Http2Error("the server does not take any more of a request")
            waiting[0].extend(data)
            self._unsent[stream.number] = waiting[0], end
            return
        size = len(data)
        if size <= min(self._frame_size, self._window, stream.window):
            self._window -= size
            stream.window -= size
            number = stream.number
            self._outgoing += _HEAD.pack(size << 8 | DATA, END_STREAM if end else 0, number) + data
            return
        self._unsent[stream.number] = bytearray(data), end
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Sends as much as the windows allow of requests that did not fit into them."""
        for number, (data, end) in list(self._unsent.items()):
            stream = self._streams.get(number)
            if stream is None:
                del self._unsent[number]
                continue
            while data and (size := min(self._frame_size, self._window, stream.window)) > 0:
                part = bytes(data[:size])
                del data[:size]
                self._window -= len(part)
                stream.window -= len(part)
                self._outgoing += _frame(DATA, END_STREAM if end and not data else 0, number, part)
            if not data:
                del self._unsent[number]

    def _answer(self, frame: bytes) -> None:
        self._answers += len(frame)
        if self._answers > MOST_ANSWER_BYTES:
            raise Http2Error("the server sends frames and does not read the replies")
        self._outgoing += frame

    # Receiving.

    def feed(self, data: bytes) -> None:
        """Takes received bytes, in pieces of any size."""
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= HEAD_BYTES:
            word, flags, number = _HEAD.unpack_from(data, at)
            size, kind = word >> 8, word & 0xFF
            if not self._greeted:
                self._greet(data, kind, flags, number)
            if size > FRAME_BYTES:
                raise Http2Error("a frame that is too long")
            after = at + HEAD_BYTES + size
            if after > end:
                break
            self._receive(kind, flags, number & LAST_STREAM, data[at + HEAD_BYTES : after])
            at = after
        self._rest = data[at:]

    def _greet(self, data: bytes, kind: int, flags: int, number: int) -> None:
        """The first frame of a server is its SETTINGS."""
        if data.startswith(b"HTTP/"):
            raise NotHttp2("it answers with HTTP/1, not with HTTP/2")
        if kind != SETTINGS or flags & ACK or number:
            raise NotHttp2("it does not speak HTTP/2")
        self._greeted = True

    def _receive(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and (kind != CONTINUATION or number != self._block[0]):
            raise Http2Error("a header that is not continued")
        handle = _HANDLERS.get(kind)
        if handle is not None:  # frames of unknown kinds are ignored
            handle(self, flags, number, payload)

    def _stream(self, number: int) -> Stream | None:
        """The open stream of that number; None if it has ended. Raises ``Http2Error`` if we never
        opened it."""
        if number % 2 == 0 or number >= self._next_stream:
            raise Http2Error("a frame of a stream that was not opened")
        return self._streams.get(number)

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        stream = self._stream(number)
        self._received = self._count(0, self._received + len(payload))
        if stream is None:
            return
        if stream.headers is None:
            raise Http2Error("a body without headers")
        stream.received = self._count(number, stream.received + len(payload))
        stream.add(_unpadded(flags, payload))
        if flags & END_STREAM:
            self._end(stream, {})

    def _count(self, number: int, received: int) -> int:
        """Opens a window of ours again once half of it is used."""
        if received < REFILL_BYTES:
            return received
        self._outgoing += _frame(WINDOW_UPDATE, 0, number, _NUMBER.pack(received))
        return 0

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        self._stream(number)
        block = _unpadded(flags, payload)
        if flags & WITH_PRIORITY:
            if len(block) < 5:
                raise Http2Error("a frame that is too short")
            block = block[5:]
        if flags & END_HEADERS:
            self._on_block(flags, number, block)
        else:
            self._block, self._block_size = (number, flags, [block]), len(block)

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self._block is None:
            raise Http2Error("a continued header without its start")
        _, first_flags, parts = self._block
        parts.append(payload)
        self._block_size += HEAD_BYTES + len(payload)  # empty parts count, too
        if self._block_size > MOST_HEADER_BYTES:
            raise Http2Error("a header that is too long")
        if flags & END_HEADERS:
            self._block = None
            self._on_block(first_flags, number, b"".join(parts))

    def _on_block(self, flags: int, number: int, block: bytes) -> None:
        fields = _decoded(block)
        stream = self._streams.get(number)
        if stream is None:
            return
        if stream.headers is None:
            if fields.get(b":status", b"").startswith(b"1"):
                return  # more headers follow
            stream.headers = fields
        elif not flags & END_STREAM:
            raise Http2Error("headers in the middle of a body")
        if flags & END_STREAM:
            self._end(stream, fields)

    def _end(self, stream: Stream, trailers: Mapping[bytes, bytes]) -> None:
        stream.trailers = trailers
        self._streams.pop(stream.number, None)
        self._unsent.pop(stream.number, None)

    def _on_reset(self, flags: int, number: int, payload: bytes) -> None:
        stream = self._stream(number)
        (code,) = _fixed(_NUMBER, payload)
        if stream is not None:
            self._refuse(stream, code)

    def _refuse(self, stream: Stream, code: int) -> None:
        stream.reset = code
        self._streams.pop(stream.number, None)
        self._unsent.pop(stream.number, None)

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) % _SETTING.size or (flags & ACK and payload):
            raise Http2Error("settings that can't be read")
        if flags & ACK:
            return
        for name, value in _SETTING.iter_unpack(payload):
            if name == INITIAL_WINDOW:
                self._change_window(value)
            elif name == FRAME_SIZE:
                if not FRAME_BYTES <= value <= LARGEST_FRAME_SIZE:
                    raise Http2Error("settings that are not allowed")
                self._frame_size = value
        self._answer(_frame(SETTINGS, ACK, 0, b""))
        self._send_waiting()

    def _change_window(self, value: int) -> None:
        """The server changes the first window of its streams: open ones change with it."""
        for stream in self._streams.values():
            stream.window += value - self._stream_window
        if value > LARGEST_WINDOW or any(
            stream.window > LARGEST_WINDOW for stream in self._streams.values()
        ):
            raise Http2Error("a window that is too large")
        self._stream_window = value

    def _on_push(self, flags: int, number: int, payload: bytes) -> None:
        raise Http2Error("a push, which we have ruled out")

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise Http2Error("a ping that can't be read")
        if not flags & ACK:
            self._answer(_frame(PING, ACK, 0, payload))

    def _on_goaway(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) < 8:
            raise Http2Error("a goodbye that can't be read")
        self.going_away = True
        last = _NUMBER.unpack_from(payload)[0] & LAST_STREAM
        for stream in list(self._streams.values()):
            if stream.number > last:
                self._refuse(stream, REFUSED_STREAM)

    def _on_window(self, flags: int, number: int, payload: bytes) -> None:
        more = _fixed(_NUMBER, payload)[0] & LARGEST_WINDOW
        stream = self._stream(number) if number else None
        if stream is not None:
            stream.window += more
        elif not number:
            self._window += more
        if not more or max(self._window, 0 if stream is None else stream.window) > LARGEST_WINDOW:
            raise Http2Error("a window that is not allowed")
        self._send_waiting()


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Http2Error("more padding than payload")
    return payload[1 : len(payload) - payload[0]]


def _fixed(layout: struct.Struct, payload: bytes) -> tuple[int, ...]:
    if len(payload) != layout.size:
        raise Http2Error("a frame of the wrong length")
    return layout.unpack(payload)


_HANDLERS: dict[int, Callable[[Http2, int, int, bytes], None]] = {
    DATA: Http2._on_data,
    HEADERS: Http2._on_headers,
    RST_STREAM: Http2._on_reset,
    SETTINGS: Http2._on_settings,
    PUSH_PROMISE: Http2._on_push,
    PING: Http2._on_ping,
    GOAWAY: Http2._on_goaway,
    WINDOW_UPDATE: Http2._on_window,
    CONTINUATION: Http2._on_continuation,
}
