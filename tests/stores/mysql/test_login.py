"""Logging in to a hostile, damaged or slow server: what the client sends, and when it gives up.
The server is a thread that implements a small part of the protocol."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pymysql
import pytest

import holdfast
from holdfast.errors import BackendUnavailable, Unsupported
from holdfast.io.clock import now
from holdfast.stores.mysql.connect import address_of, log_in
from holdfast.url import parse_url
from servers.mysql import MySQLServer
from servers.tls import Certificate, make_certificate
from stores.mysql import helpers
from stores.mysql.helpers import rows

server, admin = helpers.server, helpers.admin

PASSWORD = "CaNaRy9f3kQ"
SSL = 0x0800
Script = Callable[[socket.socket], object]


def packet(number: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "little") + bytes([number]) + payload


def greeting(tls: bool = False) -> bytes:
    capabilities = 0xF7FF | (SSL if tls else 0)
    payload = b"\x0a8.0.36\0" + (7).to_bytes(4, "little") + b"12345678\0"
    payload += capabilities.to_bytes(2, "little") + b"\x2d" + (2).to_bytes(2, "little")
    payload += (0xDFFF).to_bytes(2, "little") + b"\x15" + b"\0" * 10 + b"123456789012\0"
    return packet(0, payload + b"mysql_native_password\0")


class Pretender:
    """Listens on the loopback interface; a thread runs the script on every connection."""

    def __init__(self, script: Script) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.received = b""
        self._script = script
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, IndexError), connection:
            connection.settimeout(20)
            self._script(connection)

    def receive(self, connection: socket.socket) -> bytes:
        """Reads exactly one packet: TLS may begin after it."""
        data = self._exactly(connection, 4)
        return data + self._exactly(connection, int.from_bytes(data[:3], "little"))

    def _exactly(self, connection: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = connection.recv(size - len(data))
            if not piece:
                raise ConnectionResetError
            data += piece
            self.received += piece
        return data

    def url(self, options: str = "") -> str:
        return f"mysql://someone:{PASSWORD}@127.0.0.1:{self.port}/database{options}"

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(20)


@pytest.fixture
def pretend() -> Iterator[Callable[[Script], Pretender]]:
    with contextlib.ExitStack() as stack:

        def start(script: Script) -> Pretender:
            return stack.enter_context(contextlib.closing(Pretender(script)))

        yield start


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path)


def switching(plugin: bytes, started: list[Pretender], secured: ssl.SSLContext | None) -> Script:
    """After the login request, requests the password through another plug-in."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(greeting(secured is not None))
        data = started[0].receive(connection)
        if secured is None:
            ask(connection, data)
            return
        with secured.wrap_socket(connection, server_side=True) as inner:
            ask(inner, started[0].receive(inner))

    def ask(connection: socket.socket, data: bytes) -> None:
        connection.sendall(packet(data[3] + 1, b"\xfe" + plugin))
        started[0].receive(connection)

    return serve


PLUGINS = [b"mysql_clear_password\0", b"dialog\0\x02Password: "]


@pytest.mark.parametrize("plugin", [*PLUGINS, b"mysql_old_password\x0012345678\0"])
def test_no_password_goes_in_clear_text_over_a_plain_connection(
    pretend: Callable[[Script], Pretender], plugin: bytes
) -> None:
    """A man in the middle could request the password this way."""
    started: list[Pretender] = []
    started.append(pretend(switching(plugin, started, None)))
    with (
        holdfast.connect(started[0].url(), patience=1) as locks,
        pytest.raises(Unsupported, match=r"clear text.*without TLS.*ssl_mode") as caught,
    ):
        locks.lock("name").acquire()
    assert PASSWORD.encode() not in started[0].received
    assert b"someone\0" in started[0].received
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_under_tls_the_server_may_ask_for_the_password(
    pretend: Callable[[Script], Pretender], certificate: Certificate, plugin: bytes
) -> None:
    """Servers that pass the password to PAM or LDAP do so, and TLS keeps it secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    started: list[Pretender] = []
    started.append(pretend(switching(plugin, started, context)))
    address = address_of(parse_url(started[0].url(f"?ssl_ca={certificate.certificate}")))
    with pytest.raises(BackendUnavailable):  # the server then ends the connection
        log_in(address, now() + 20)
    assert PASSWORD.encode() in started[0].received


MODES = ["required", "verify_ca", "verify_identity"]


@pytest.mark.parametrize("mode", MODES)
def test_a_server_without_tls_gets_no_login(
    pretend: Callable[[Script], Pretender], mode: str
) -> None:
    started: list[Pretender] = []
    started.append(pretend(switching(PLUGINS[0], started, None)))
    with (
        holdfast.connect(started[0].url(f"?ssl_mode={mode}"), patience=0.5) as locks,
        pytest.raises(BackendUnavailable, match="SSL is required"),
    ):
        locks.lock("name").acquire()
    assert not started[0].received


def test_an_older_pymysql_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It logs in without TLS if the server claims not to support it."""
    monkeypatch.setattr(pymysql, "VERSION", (1, 1, 3, "final"))
    address = address_of(parse_url("mysql://u@localhost:1/d?ssl_mode=verify_identity"))
    with pytest.raises(Unsupported, match=r"PyMySQL.*TLS"):
        log_in(address, now() + 20)


@pytest.mark.parametrize("mode", MODES)
def test_a_login_without_the_tls_that_was_asked_for_is_ended(
    server: MySQLServer, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """In case a PyMySQL version logs in without TLS again."""
    real = pymysql.Connection._request_authentication  # type: ignore[attr-defined]

    def without_tls(client: Any) -> None:
        client.ssl = False
        client.client_flag &= ~SSL
        real(client)

    monkeypatch.setattr(pymysql.Connection, "_request_authentication", without_tls)
    with pytest.raises(Unsupported, match="without it"):
        log_in(address_of(parse_url(f"{server.url}?ssl_mode={mode}")), now() + 20)


def test_a_login_that_drips_ends_by_its_deadline(pretend: Callable[[Script], Pretender]) -> None:
    """The deadline is that of the whole login, also if a byte arrives now and then."""
    stop = threading.Event()

    def drip(connection: socket.socket) -> None:
        for byte in greeting():
            connection.sendall(bytes([byte]))
            if stop.wait(0.3):
                return

    address = address_of(parse_url(pretend(drip).url()))
    begun = time.monotonic()
    try:
        with pytest.raises(BackendUnavailable, match=r"in time|timed out"):
            log_in(address, now() + 1.0)
        assert time.monotonic() - begun < 4.0
    finally:
        stop.set()


GREETING = greeting()
DAMAGED = {
    "nothing": b"",
    "an empty packet": packet(0, b""),
    "a version alone": packet(0, b"\x0a"),
    "no end of the version": packet(0, b"\x0a8.0.36"),
    "no number in the version": packet(0, b"\x0aabc\0" + GREETING[12:]),
    "bytes that are no text": packet(0, b"\x0a\xff\xfe\xfd\0" + GREETING[12:]),
    "an unknown character set": packet(0, GREETING[4:27] + b"\xfa" + GREETING[28:]),
    "an error without a number": packet(0, b"\xff"),
    "an error of an odd number": packet(0, b"\xff\x01"),
    "another number": packet(9, GREETING[4:]),
    "something else": b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20,
}
CUT = {f"the first {size} bytes": packet(0, GREETING[4 : 4 + size]) for size in range(8, 60, 3)}


@pytest.mark.parametrize("how", [*DAMAGED, *CUT])
def test_a_damaged_greeting_is_no_mysql(pretend: Callable[[Script], Pretender], how: str) -> None:
    """Every error of PyMySQL becomes ``BackendUnavailable``."""
    damaged = DAMAGED.get(how) or CUT.get(how) or b""

    def serve(connection: socket.socket) -> None:
        connection.sendall(damaged)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass

    started = pretend(serve)
    with pytest.raises(BackendUnavailable, match=f"127.0.0.1:{started.port}"):
        log_in(address_of(parse_url(started.url())), now() + 20)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_damaged_answer_to_the_login_is_no_mysql(
    pretend: Callable[[Script], Pretender], step: int
) -> None:
    answers = [
        b"",
        b"\0",
        b"\0\xfc\1",
        b"\xfe",
        b"\xfe\xff\xff\0",
        b"\1",
        b"\1\4",
        b"\x07",
        b"\xfb",
    ]
    for answer in answers:

        def serve(connection: socket.socket, answer: bytes = answer) -> None:
            connection.sendall(greeting())
            for packet_number in range(1, step + 1):
                data = connection.recv(65536)
                good = b"\0\0\0\2\0\0\0"
                connection.sendall(packet(data[3] + 1, answer if packet_number == step else good))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass

        started = pretend(serve)
        with contextlib.suppress(BackendUnavailable):  # some of these replies are valid
            log_in(address_of(parse_url(started.url())), now() + 20).close()


def test_a_login_has_an_end(pretend: Callable[[Script], Pretender]) -> None:
    """The login reads a bounded number of bytes, however many the server sends."""
    sent = 0
    done = threading.Event()

    def serve(connection: socket.socket) -> None:
        nonlocal sent
        try:
            for number in range(64):
                connection.sendall(b"\xff\xff\xff" + bytes([number]))
                for _ in range(256):
                    sent += connection.send(b"x" * 65536)
        finally:
            done.set()

    with pytest.raises(BackendUnavailable, match="bytes for a login"):
        log_in(address_of(parse_url(pretend(serve).url())), now() + 60)
    assert done.wait(20)
    assert sent < 1 << 26  # what the buffers of the two sockets can take


def test_the_deadline_ends_with_the_login(server: MySQLServer) -> None:
    """A request after the login may take longer than the login's deadline."""
    client = log_in(address_of(parse_url(server.url)), now() + 1.5)
    with contextlib.closing(client), client.cursor() as cursor:
        cursor.execute("SELECT SLEEP(2)")
        assert cursor.fetchall() == ((0,),)


def enter(address: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "holdfast", "fence", "enter", address, "1;exclusive;;0;1;lock"]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def test_a_resource_is_connected_to_as_a_store_is(
    pretend: Callable[[Script], Pretender], server: MySQLServer, admin: Any
) -> None:
    """All options of its address are used: TLS, and the UNIX socket."""
    started: list[Pretender] = []
    started.append(pretend(switching(PLUGINS[0], started, None)))
    done = enter(started[0].url("?ssl_mode=verify_identity") + "#orders")
    assert (done.returncode, started[0].received) == (69, b"")
    assert "SSL is required" in done.stderr
    assert PASSWORD not in done.stderr
    done = enter(started[0].url() + "#orders")
    assert PASSWORD.encode() not in started[0].received
    assert "clear text" in done.stderr
    done = enter(started[0].url("?sslmode=verify-full") + "#orders")
    assert "has no option 'sslmode'" in done.stderr
    rows(admin, "DROP TABLE IF EXISTS holdfast_fence")
    password = server.url.split("@")[0]
    path = server.folder / "mysql.sock"
    done = enter(f"{password}@/holdfast?unix_socket={path}#orders")
    assert done.returncode == 0, done.stderr
    assert rows(admin, "SELECT token FROM holdfast_fence") == [(1,)]


def test_a_password_that_is_not_ascii(server: MySQLServer, admin: Any) -> None:
    """PyMySQL by itself encodes it as Latin-1, or raises an error that contains it."""
    rows(admin, "CREATE OR REPLACE USER wide@'%' IDENTIFIED BY 'pä€ss'")
    url = f"mysql://wide:p%C3%A4€ss@{server.host}:{server.port}/information_schema"
    log_in(address_of(parse_url(url)), now() + 10).close()
    rows(admin, "DROP USER wide@'%'")
