"""A server that is none of ours: it answers with whatever bytes a test wants."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

from servers.tls import Certificate

__all__ = ["ConnectionHandler", "answering", "fake_server", "http_reply"]

ConnectionHandler = Callable[[socket.socket], None]
"""What it does with one connection, until it returns."""
REQUEST_BYTES = 65_536


def answering(reply: bytes) -> ConnectionHandler:
    """Answers every request with the same bytes."""

    def talk(wire: socket.socket) -> None:
        while wire.recv(REQUEST_BYTES):
            wire.sendall(reply)

    return talk


def http_reply(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _tls(own: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    return context


@contextlib.contextmanager
def fake_server(talk: ConnectionHandler, own: Certificate | None = None) -> Iterator[int]:
    """The port of a server that is there for as long as the block is; with a certificate of its
    own it speaks TLS."""
    context = None if own is None else _tls(own)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        wires: list[socket.socket] = []

        def serve(wire: socket.socket) -> None:
            with contextlib.suppress(OSError), wire:
                if context is None:
                    talk(wire)
                    return
                with context.wrap_socket(wire, server_side=True) as inside:
                    talk(inside)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    wire, _ = listening.accept()
                    wires.append(wire)
                    threading.Thread(target=serve, args=(wire,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield int(listening.getsockname()[1])
        finally:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            for wire in wires:
                with contextlib.suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR)
