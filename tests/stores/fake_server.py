"""A fake server that sends the bytes a test wants."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

from servers.tls import Certificate

__all__ = ["ConnectionHandler", "answering", "fake_server", "http_reply"]

ConnectionHandler = Callable[[socket.socket], None]
"""Serves one connection until it returns."""
REQUEST_BYTES = 65_536


def answering(reply: bytes) -> ConnectionHandler:
    """Return a handler that answers every request with the same bytes."""

    def handle(connection: socket.socket) -> None:
        while connection.recv(REQUEST_BYTES):
            connection.sendall(reply)

    return handle


def http_reply(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _tls(own: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    return context


@contextlib.contextmanager
def fake_server(handle: ConnectionHandler, own: Certificate | None = None) -> Iterator[int]:
    """Run a server during the block; yield its port. With a certificate it uses TLS."""
    context = None if own is None else _tls(own)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connections: list[socket.socket] = []

        def serve(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                if context is None:
                    handle(connection)
                    return
                with context.wrap_socket(connection, server_side=True) as inside:
                    handle(inside)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    connections.append(connection)
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield int(listening.getsockname()[1])
        finally:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
