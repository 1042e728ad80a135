"""Opening a connection, and its bytes, in all three worlds: against real sockets."""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hazards.drivers import Lines, Numbered, every_world, in_world
from holdfast.io import sockets
from holdfast.io.clock import now
from holdfast.io.connection import Broken, World, exchange, open_socket, open_unix
from servers.tls import make_certificate
from stores.fake_server import fake_server

SOON = 30.0
SHORT = 0.4
SPARE_SECONDS = 5.0


def echo(connection: socket.socket) -> None:
    """Sends back what it gets."""
    while data := connection.recv(65_536):
        connection.sendall(data)


def silence(connection: socket.socket) -> None:
    while connection.recv(65_536):
        pass


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


async def opened(world: World, port: int, tls: ssl.SSLContext | None = None) -> Lines:
    return Lines(await open_socket(world, "127.0.0.1", port, now() + SOON, tls))


@every_world
def test_requests_and_replies(kind: str) -> None:
    async def body(world: World) -> list[Any]:
        connection = await opened(world, port)
        try:
            return await exchange(world, connection, [b"one\n", b"two\n"], now() + SOON)
        finally:
            connection.close()

    with fake_server(echo) as port:
        assert in_world(kind, body) == [b"one", b"two"]


@pytest.mark.parametrize("secured", [False, True])
@every_world
def test_more_than_the_buffers_hold(kind: str, secured: bool, tmp_path: Path) -> None:
    """Both sides have full buffers: the client reads while it writes."""
    made = make_certificate(tmp_path) if secured else None
    large = [bytes([65 + n]) * 100_000 + b"\n" for n in range(26)] + [b"z" * 8_000_000 + b"\n"]

    async def body(world: World) -> list[Any]:
        tls = trusting(made.certificate) if made is not None else None
        connection = await opened(world, port, tls)
        try:
            return await exchange(world, connection, large, now() + SOON)
        finally:
            connection.close()

    with fake_server(echo, made) as port:
        assert [line + b"\n" for line in in_world(kind, body)] == large


@every_world
def test_replies_in_another_order(kind: str) -> None:
    def backwards(connection: socket.socket) -> None:
        data = b""
        while data.count(b"\n") < 3:
            data += connection.recv(65_536)
        connection.sendall(b"\n".join(reversed(data.split(b"\n")[:-1])) + b"\n")

    async def body(world: World) -> list[Any]:
        connection = Numbered(await open_socket(world, "127.0.0.1", port, now() + SOON))
        try:
            return await exchange(world, connection, [b"a\n", b"b\n", b"c\n"], now() + SOON)
        finally:
            connection.close()

    with fake_server(backwards) as port:
        assert in_world(kind, body) == [b"a", b"b", b"c"]


@every_world
def test_a_unix_socket(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def serve() -> None:
            with listening.accept()[0] as accepted:
                echo(accepted)

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()

        async def body(world: World) -> list[Any]:
            connection = Lines(await open_unix(world, path, now() + SOON))
            try:
                return await exchange(world, connection, [b"one\n"], now() + SOON)
            finally:
                connection.close()

        assert in_world(kind, body) == [b"one"]
        serving.join(SOON)


@every_world
def test_a_unix_socket_with_a_full_queue_is_waited_for(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    waiting = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(0)
        while True:
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            waiting.append(one)
            if one.connect_ex(path) == errno.EAGAIN:
                break

        async def too_late(world: World) -> None:
            await open_unix(world, path, now() + SHORT)

        with pytest.raises(TimeoutError):
            in_world(kind, too_late)

        def accept() -> None:
            time.sleep(0.1)
            for _ in waiting:
                listening.accept()[0].close()

        async def in_time(world: World) -> None:
            (await open_unix(world, path, now() + SOON)).close()

        threading.Thread(target=accept, daemon=True).start()
        in_world(kind, in_time)
    for one in waiting:
        one.close()


def mute(_: socket.socket) -> None:
    time.sleep(SOON)


@pytest.mark.parametrize("stage", ["look-up", "TLS", "TLS on a plain port", "greeting"])
@every_world
def test_one_deadline_for_all_stages(
    kind: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_certificate(tmp_path)
    ended = threading.Event()

    def hang(*_: object) -> Any:
        ended.wait(SOON)
        raise OSError("ended")

    async def body(world: World) -> None:
        tls = trusting(made.certificate) if stage.startswith("TLS") else None
        until = now() + SHORT
        connection = Lines(await open_socket(world, host, port, until, tls))
        try:
            await exchange(world, connection, [b"one\n"], until)
        finally:
            connection.close()

    host = "127.0.0.1"
    if stage == "look-up":
        host = f"hangs-{kind}.example"
        monkeypatch.setattr(sockets, "look_up_now", hang)
    handler = echo if stage == "TLS on a plain port" else silence
    with fake_server(handler) as port:
        began = now()
        with pytest.raises(
            OSError, match=r"(?i)too long|timed out|^$|unexpected message|wrong version"
        ):
            in_world(kind, body)
        assert now() - began < SHORT + SPARE_SECONDS
    ended.set()


@every_world
def test_a_server_that_never_stops_to_send_has_no_more_time(kind: str) -> None:
    """There is always something to read, and never a reply."""

    def flood(connection: socket.socket) -> None:
        until = now() + 2 * SPARE_SECONDS
        while now() < until:
            connection.sendall(b"!push\n" * 100_000)

    async def body(world: World) -> None:
        connection = await opened(world, port)
        try:
            await exchange(world, connection, [b"one\n"], now() + SHORT)
        finally:
            connection.close()

    with fake_server(flood) as port:
        began = now()
        with pytest.raises(TimeoutError):
            in_world(kind, body)
        assert now() - began < SHORT + SPARE_SECONDS


@every_world
def test_the_second_address_is_tried_beside_a_silent_first_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its listener's queue is full: it never answers."""
    with socket.create_server(("127.0.0.2", 0), backlog=0) as dark, fake_server(echo) as port:
        fillers = []
        for _ in range(8):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(dark.getsockname())
            fillers.append(filler)

        def found(*_: object) -> list[Any]:
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 0, "", dark.getsockname()),
                (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)),
            ]

        async def body(world: World) -> Any:
            sock = await open_socket(world, f"two-{kind}.example", port, now() + SOON)
            with sock:
                return sock.getpeername()

        monkeypatch.setattr(sockets, "look_up_now", found)
        assert in_world(kind, body) == ("127.0.0.1", port)
        for filler in fillers:
            filler.close()


@every_world
def test_a_refused_connection_says_so(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]

    async def body(world: World) -> None:
        await open_socket(world, "127.0.0.1", port, now() + SOON)

    with pytest.raises(ConnectionRefusedError):
        in_world(kind, body)


@every_world
def test_an_unknown_certificate_is_refused(kind: str, tmp_path: Path) -> None:
    made = make_certificate(tmp_path)

    async def body(world: World) -> None:
        await open_socket(world, "127.0.0.1", port, now() + SOON, tls=ssl.create_default_context())

    with fake_server(echo, made) as port, pytest.raises(ssl.SSLError, match="verify failed"):
        in_world(kind, body)


@pytest.mark.parametrize("said", [b"", b"half a li", b"damaged\n"])
@every_world
def test_a_broken_stream(kind: str, said: bytes) -> None:
    """It ends before, or within, the reply; or it can't be read."""

    def handle(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(said)

    async def body(world: World) -> None:
        connection = await opened(world, port)
        try:
            await exchange(world, connection, [b"one\n"], now() + SOON)
        finally:
            connection.close()

    with fake_server(handle) as port, pytest.raises(Broken) as caught:
        in_world(kind, body)
    assert caught.value.closed is (said != b"damaged\n")


@every_world
def test_pushes_are_no_replies(kind: str) -> None:
    def handle(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(b"!first\none\n!second\n")
        connection.recv(100)

    pushed: list[bytes] = []

    async def body(world: World) -> Any:
        connection = await opened(world, port)
        connection.on_push = pushed.append
        try:
            return await exchange(world, connection, [b"one\n"], now() + SOON)
        finally:
            connection.close()

    with fake_server(handle) as port:
        assert in_world(kind, body) == [b"one"]
    assert pushed[:1] == [b"first"]
