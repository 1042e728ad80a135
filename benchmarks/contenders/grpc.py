"""gRPC without a client library: one connection, one call at a time."""

from __future__ import annotations

import struct
from urllib.parse import urlsplit

from benchmarks.tape import dial
from holdfast.io.http2 import Http2, header_block

__all__ = ["RawGrpc"]

PREFIX_BYTES = 5


class RawGrpc:
    """One connection. Calls are packed ahead by ``prepared``."""

    def __init__(self, url: str) -> None:
        self._sock = dial(url)
        self._authority = urlsplit(url).netloc.encode()
        self._http2 = Http2()

    def prepared(self, path: str, message: bytes) -> tuple[bytes, bytes]:
        """The header block and the body of a call."""
        fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode())]
        fields += [(b":authority", self._authority), (b"content-type", b"application/grpc")]
        fields.append((b"te", b"trailers"))
        return header_block(fields), struct.pack(">BI", 0, len(message)) + message

    def send(self, call: tuple[bytes, bytes]) -> bytes:
        """The message of the reply."""
        stream = self._http2.request(*call)
        self._sock.sendall(self._http2.take())
        while not stream.ended:
            self._http2.feed(self._sock.recv(65536))
        if stream.trailers is None or stream.trailers.get(b"grpc-status") != b"0":
            raise ConnectionError(f"the server refused a call: {stream.trailers}")
        return stream.take()[PREFIX_BYTES:]

    def ask(self, path: str, message: bytes) -> bytes:
        return self.send(self.prepared(path, message))

    def close(self) -> None:
        self._sock.close()
