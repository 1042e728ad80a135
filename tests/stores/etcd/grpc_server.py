"""A fake gRPC server: HTTP/2 frames by hand, with the replies that a test wants."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

from hpack import Encoder

from stores.fake_server import ConnectionHandler

__all__ = ["HEADER", "SETTINGS", "answering", "frame", "grpc_reply", "headers"]

PREFACE_BYTES = 24
HEADERS_FRAME, END_HEADERS, END_STREAM = 1, 4, 1


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


SETTINGS = frame(4, 0, 0)
HEADER = b"\x0a\x04\x18\x07\x20\x03"
"""The header of every reply: revision 7, term 3."""


def headers(stream: int, *fields: tuple[str, str], end: bool = False) -> bytes:
    encoder = Encoder()
    encoder.header_table_size = 0
    flags = END_HEADERS | (END_STREAM if end else 0)
    return frame(HEADERS_FRAME, flags, stream, bytes(encoder.encode(list(fields))))


def grpc_reply(stream: int, message: bytes, status: int = 0, text: str = "") -> bytes:
    """A whole reply to a call: with a status other than 0, only its trailers."""
    done = ("grpc-status", str(status)), ("grpc-message", text)
    if status:
        return headers(stream, (":status", "200"), *done, end=True)
    body = struct.pack(">BI", 0, len(message)) + message
    start = headers(stream, (":status", "200"), ("content-type", "application/grpc"))
    return start + frame(0, 0, stream, body) + headers(stream, *done, end=True)


def answering(reply: Callable[[int], bytes]) -> ConnectionHandler:
    """Return a handler that answers every call with what the function returns for its stream."""

    def handle(connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        stream.read(PREFACE_BYTES)
        connection.sendall(SETTINGS)
        while head := stream.read(9):
            size, (kind, _, number) = (
                int.from_bytes(head[:3], "big"),
                struct.unpack(">BBI", head[3:]),
            )
            stream.read(size)
            if kind == HEADERS_FRAME:
                connection.sendall(reply(number))

    return handle
