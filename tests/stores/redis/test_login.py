"""Login: what is sent, and what a refused one leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io import aio, blocking
from holdfast.io.clock import now
from holdfast.io.connection import exchange
from holdfast.io.resp import RespConnection, pack
from holdfast.stores.redis.connection import Connector, RedisEndpoint
from holdfast.stores.redis.routes import node_address
from holdfast.stores.redis.url import Access, Greeting, NodeAddress
from holdfast.testing import Flavour
from servers.redis import RedisServer
from servers.registry import Servers
from servers.tls import make_certificate
from stores.fake_server import answering, fake_server
from stores.redis.helpers import blocking_and_asyncio, clients


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
    """Even if the server never closes its side."""
    made = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    files = {"ssl_ca_certs": str(made.certificate)}
    options = {"password": "wrong", "client_name": "", **files}
    access = Access(tls=True, options=options, request_seconds=20.0)

    async def body(port: int, left: Future[bool]) -> None:
        endpoint = RedisEndpoint(access, NodeAddress("127.0.0.1", port))
        with pytest.raises(BackendUnavailable, match="invalid username-password pair"):
            await endpoint.open(aio.WORLD, now() + 20.0)
        assert await asyncio.wrap_future(left)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        left = threads.submit(_refuse, listener, context)
        asyncio.run(body(listener.getsockname()[1], left))


@pytest.fixture
def few_rights() -> Iterator[RedisServer]:
    with RedisServer(users=("few on >pw ~* &* +@all -client -hello -info -command",)) as server:
        yield server


@blocking_and_asyncio
def test_a_user_without_client_hello_and_info(few_rights: RedisServer, flavour: Flavour) -> None:
    url = f"redis://few:pw@{few_rights.host}:{few_rights.port}/1"

    async def main() -> None:
        async with clients(url, flavour) as (locks,):
            lease = await locks.lock("name", timeout=20).acquire()
            assert await lease.release()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("query", "name"), [("", "holdfast"), ("?client_name=mine", "mine"), ("?client_name=", "")]
)
@blocking_and_asyncio
def test_connections_have_a_name(servers: Servers, flavour: Flavour, query: str, name: str) -> None:
    server = servers.of(RedisServer)

    def names() -> list[str]:
        lines = str(server.ask("CLIENT", "LIST")).splitlines()
        return [line.split(" name=")[1].split(" ")[0] for line in lines]

    async def main() -> None:
        before = names().count(name)
        async with clients(f"{server.url}{query}", flavour) as (locks,):
            lease = await locks.lock("named", timeout=20).acquire()
            assert names().count(name) > before
            assert await lease.release()

    asyncio.run(main())


def _open(access: Access, port: int) -> RespConnection:
    endpoint = RedisEndpoint(access, NodeAddress("127.0.0.1", port))
    return run_now(endpoint.open(blocking.WORLD, now() + 20.0))


def _open_at(port: int, options: dict[str, Any]) -> RespConnection:
    """Without a name: so a server that answers one command is enough."""
    options = {"client_name": "", **options}
    return _open(Access(tls=False, options=options, request_seconds=20.0), port)


def test_a_proxy_that_closes_at_a_command_it_does_not_know() -> None:
    """As some do for CLIENT: the connection is opened again without a name, later ones at once."""
    seen: list[bytes] = []

    def handle(connection: socket.socket) -> None:
        while data := connection.recv(1024):
            seen.append(data)
            if b"CLIENT" in data:
                return
            connection.sendall(b"+OK\r\n" * data.count(b"*"))

    with fake_server(handle) as port:
        access = Access(tls=False, options={"password": "secret"}, request_seconds=20.0)
        for _ in range(3):
            _open(access, port).close()
    assert [b"CLIENT" in data for data in seen] == [True, False, False, False]
    assert b"HELLO" not in b"".join(seen)


def test_a_server_that_has_no_users() -> None:
    """Before Redis 6, AUTH takes a password only."""
    seen: list[bytes] = []

    def handle(connection: socket.socket) -> None:
        while data := connection.recv(1024):
            seen.append(data)
            refused = b"-ERR wrong number of arguments for 'auth' command\r\n"
            connection.sendall(refused if b"user" in data else b"+OK\r\n")

    with fake_server(handle) as port:
        _open_at(port, {"username": "user", "password": "secret"}).close()
    assert seen[-1] == pack("AUTH", "secret")


@pytest.mark.parametrize("option", ["ssl_validate_ocsp", "ssl_validate_ocsp_stapled"])
def test_a_check_of_certificates_that_is_not_done_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match="OCSP"):
        Access(tls=True, options={option: True}, request_seconds=20.0)


def test_certificates_are_read_again_when_they_have_changed(tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    options = {"ssl_ca_certs": str(made.certificate)}
    access = Access(tls=True, options=options, request_seconds=20.0)
    first = access.context()
    assert access.context() is first
    later = made.certificate.stat().st_mtime + 5
    os.utime(made.certificate, (later, later))
    assert access.context() is not first


@pytest.mark.parametrize("reply", [b"$70000\r\n", b"*101\r\n"])
def test_a_reply_to_a_login_is_small(reply: bytes) -> None:
    with (
        fake_server(answering(reply)) as port,
        pytest.raises(BackendUnavailable, match="larger than any reply"),
    ):
        _open_at(port, {"password": "secret"})


def test_after_the_login_a_reply_may_be_large() -> None:
    def handle(connection: socket.socket) -> None:
        connection.recv(1024)
        connection.sendall(b"+OK\r\n")
        connection.recv(1024)
        connection.sendall(b"$70000\r\n" + b"x" * 70_000 + b"\r\n")
        connection.recv(1024)

    with fake_server(handle) as port:
        connection = _open_at(port, {"password": "secret"})
        asked = exchange(blocking.WORLD, connection, [pack("GET", "x")], now() + 20.0)
        assert run_now(asked) == [b"x" * 70_000]
        connection.close()


@pytest.mark.parametrize("user", [{}, {"username": "bob"}])
def test_a_server_that_repeats_the_password(user: dict[str, str]) -> None:
    """As Redis does if it does not know AUTH."""
    said = b"-ERR unknown command 'AUTH', with args beginning with: 'bob' 'S3CRET' \r\n"
    with (
        fake_server(answering(said)) as port,
        pytest.raises(BackendUnavailable, match="unknown command") as caught,
    ):
        _open_at(port, {"password": "S3CRET", **user})
    error: BaseException | None = caught.value
    while error is not None:
        assert "S3CRET" not in repr(error)
        error = error.__cause__ or error.__context__


class Provider:
    """A credential provider that fails, or never answers."""

    def __init__(self, *, hangs: bool) -> None:
        self._hangs = hangs

    def get_credentials(self) -> tuple[str, str]:
        raise LookupError("token service down: S3CRET")

    async def get_credentials_async(self) -> tuple[str, str]:
        if self._hangs:
            await asyncio.sleep(3600)
        return self.get_credentials()


def test_a_credential_provider_that_hangs_has_the_time_of_a_request() -> None:
    access = Access(
        tls=False, options={"credential_provider": Provider(hangs=True)}, request_seconds=20.0
    )

    async def body(port: int) -> None:
        async with asyncio.timeout(20.0):
            await Connector(access, 1, blocking=False).begin(
                access, NodeAddress("127.0.0.1", port), [pack("PING")], now() + 1.0
            )

    with (
        fake_server(answering(b"+OK\r\n")) as port,
        pytest.raises(BackendUnavailable, match="credential provider failed with TimeoutError"),
    ):
        asyncio.run(body(port))


@pytest.mark.parametrize("threads", [True, False])
def test_a_credential_provider_that_fails(threads: bool) -> None:
    access = Access(
        tls=False, options={"credential_provider": Provider(hangs=False)}, request_seconds=20.0
    )
    with fake_server(answering(b"+OK\r\n")) as port:
        endpoint = RedisEndpoint(access, NodeAddress("127.0.0.1", port))
        run, world = (run_now, blocking.WORLD) if threads else (asyncio.run, aio.WORLD)
        with pytest.raises(BackendUnavailable, match="failed with LookupError") as caught:
            run(endpoint.open(world, now() + 20.0))
    assert "S3CRET" not in str(caught.value)
    assert not caught.value.final


@pytest.mark.parametrize("port", ["0", "00000", "65536", "99999", "-1", "", "6379x"])
def test_a_node_names_no_unix_socket(port: str) -> None:
    """Port 0 is a path: a node must not send us, with the password, to a socket of this host."""
    with pytest.raises(BackendUnavailable, match="not the address of a node"):
        node_address("/run/some.sock", port)


@pytest.mark.parametrize("options", [{"db": 1}, {"password": "pw", "db": 1}, {"client_name": "me"}])
def test_a_server_that_says_why_and_closes(options: dict[str, Any]) -> None:
    """After the first of several commands."""

    def handle(connection: socket.socket) -> None:
        connection.recv(1024)
        connection.sendall(b"-ERR max number of clients reached\r\n")

    access = Access(tls=False, options=options, request_seconds=20.0)
    with fake_server(handle) as port:
        greeting = Greeting(pack("INFO", "memory"), lambda _: None)
        endpoint = RedisEndpoint(access, NodeAddress("127.0.0.1", port), greeting)
        with pytest.raises(BackendUnavailable, match="max number of clients reached"):
            run_now(endpoint.open(blocking.WORLD, now() + 20.0))


def test_a_connection_that_is_reset_is_told_in_words() -> None:
    def handle(connection: socket.socket) -> None:
        connection.recv(1024)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with (
        fake_server(handle) as port,
        pytest.raises(BackendUnavailable, match=r"broke: Connection reset by peer$"),
    ):
        _open_at(port, {"password": "secret"})


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".example"])
@blocking_and_asyncio
def test_a_host_that_has_no_valid_name(host: str, flavour: Flavour) -> None:
    async def main() -> None:
        async with clients(f"redis://{host}:1/0", flavour) as (locks,):
            with pytest.raises(BackendUnavailable, match="not the name of a host"):
                await locks.lock("name", timeout=1).acquire()

    asyncio.run(main())
