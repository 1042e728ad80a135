"""Login over asyncio: redis-py opens the connection, then its transport is taken over."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import BackendUnavailable
from holdfast.stores.redis.aio import AsyncRedisConnection
from holdfast.stores.redis.url import Access, NodeAddress
from servers.tls import make_certificate


def _refuse(listener: socket.socket, context: ssl.SSLContext) -> bool:
    """Answers a login with an error and never closes. Returns True when the client has closed."""
    connection, _ = listener.accept()
    with connection, context.wrap_socket(connection, server_side=True) as secured:
        secured.recv(1024)
        secured.sendall(b"-WRONGPASS invalid username-password pair\r\n")
        # Read below TLS, so that the client's TLS shutdown is never answered.
        raw = socket.socket(fileno=secured.detach())
        with raw, contextlib.suppress(ConnectionResetError):
            raw.settimeout(10.0)
            while raw.recv(1024):
                pass
        return True


def test_a_refused_login_leaves_no_connection(tmp_path: Path) -> None:
    """Even if the server never closes: a transport that redis-py begins to close is aborted."""
    made = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    options = {"password": "wrong", "ssl_ca_certs": str(made.certificate)}
    access = Access(tls=True, options=options, request_seconds=20.0)

    async def body(port: int, left: Future[bool]) -> None:
        with pytest.raises(BackendUnavailable, match="invalid username-password pair"):
            await AsyncRedisConnection.open(access, NodeAddress("127.0.0.1", port))
        assert await asyncio.wrap_future(left)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        left = threads.submit(_refuse, listener, context)
        asyncio.run(body(listener.getsockname()[1], left))
