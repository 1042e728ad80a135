"""HTTP/1.1 as a client speaks it, over one kept connection: one request at a time.

``Responses`` parses what a server sends and knows no socket; ``HttpStream`` is the connection that
the drivers use. A connection that has received more than the response to its request is not used
again: the next request would take the rest for its own response.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import httptools

from holdfast.io.connection import PENDING, Broken, Stream

__all__ = ["HttpStream", "Reply", "Responses", "request_bytes"]

MOST_HEAD_BYTES = 65_536
MOST_ANSWER_BYTES = 64 * 2**20
"""The longest answer, head and body."""
LONGEST_INDEX = 20
LONGEST_MESSAGE = 200
_LAST_INTERIM_STATUS = 199
# Closes with a reset, so that unsent data never reaches the server late.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def request_bytes(line: bytes, authority: bytes, headers: bytes, body: bytes) -> bytes:
    """The bytes of a request. ``line`` is its method and path, such as ``PUT /v1/txn``; ``headers``
    are whole lines."""
    return b"%b HTTP/1.1\r\nHost: %b\r\n%bContent-Length: %d\r\n\r\n%b" % (
        line,
        authority,
        headers,
        len(body),
        body,
    )


class Reply(NamedTuple):
    """One HTTP response."""

    status: int
    body: bytes
    seen: int = 0
    """The number in the index header, such as Consul's for blocking queries; 0 for none."""


class Responses:
    """Parses the responses of one connection, from data in pieces of any size."""

    def __init__(self, index_header: bytes = b"") -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._index_header = index_header
        """In lower case. Its number is ``Reply.seen``."""
        self._body: list[bytes] = []
        self._index = 0
        self._headed = False
        self._reply: Reply | None = None
        self._taken = 0
        """How many bytes of the response have been received so far."""
        self.waiting = False
        """Whether a request has no response yet."""
        self.reusable = True
        """False if the server closes the connection after the last response, or has sent more than
        that response."""

    def on_message_begin(self) -> None:
        if not self.waiting:
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if (
            name.lower() == self._index_header
            and value.isdigit()
            and len(value) <= LONGEST_INDEX
            and self.waiting
        ):
            self._index = int(value)

    def on_headers_complete(self) -> None:
        self._headed = True

    def on_body(self, body: bytes) -> None:
        if self.waiting:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if not self.waiting:
            return
        status: int = self._parser.get_status_code()
        if status <= _LAST_INTERIM_STATUS:  # another response to the same request follows
            self._headed, self._index = False, 0
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._reply = Reply(status, body, self._index)
        self.reusable = self._parser.should_keep_alive()  # the parser knows it only now
        self.waiting = False

    def begin(self) -> None:
        """A request is sent."""
        self._body, self._index, self._taken, self._headed = [], 0, 0, False
        self.waiting = True

    def feed(self, data: bytes) -> Reply | None:
        """The response, once it is complete. Raises ``Broken`` if it is not HTTP, too long, or
        answers no request."""
        if not self.waiting:
            raise Broken("the server sent a response without a request")
        self._taken += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if isinstance(error, httptools.HttpParserCallbackError) and error.__context__:
                raise error.__context__ from None  # an interrupt in a method above
            self.reusable = False
            if self._reply is None:
                message = f"answered with something that is not HTTP ({error})"
                raise Broken(message[:LONGEST_MESSAGE]) from None
        reply, self._reply = self._reply, None
        if reply is None and self._taken > (MOST_ANSWER_BYTES if self._headed else MOST_HEAD_BYTES):
            raise Broken("the response is too long")
        return reply


class HttpStream(Stream):
    """A kept connection. A request is its bytes, a reply a ``Reply``."""

    index_header: ClassVar[bytes] = b""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._responses = Responses(self.index_header)
        self._reply: Reply | None = None

    def send(self, request: bytes) -> None:
        self._responses.begin()
        super().send(request)

    def send_all(self, requests: Sequence[Any]) -> None:
        (request,) = requests
        self.send(request)

    def feed(self, data: bytes) -> None:
        reply = self._responses.feed(data)
        if reply is not None:
            self._reply = reply
            # The rest of a request that was answered early would come before the next request.
            self.usable = self._responses.reusable and not self.unsent

    def next(self) -> Any:
        if self._reply is None:
            return PENDING
        reply, self._reply = self._reply, None
        return reply

    def close(self) -> None:
        if self._responses.waiting:
            with suppress(OSError):  # it is closed already
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        super().close()
