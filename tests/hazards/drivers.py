"""The three worlds in which a connection is opened and used, and a small echo protocol."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from holdfast.core.drive import run_now
from holdfast.io import aio, blocking
from holdfast.io.connection import PENDING, Broken, Connection, Stream, World, open_socket

__all__ = [
    "WORLDS",
    "Failed",
    "Lines",
    "LinesEndpoint",
    "Numbered",
    "backwards",
    "counted",
    "echo",
    "every_world",
    "in_world",
]

Body = Callable[[World], Coroutine[Any, Any, Any]]
WORLDS = ["threads", "asyncio", "uvloop"]
every_world = pytest.mark.parametrize("kind", WORLDS)


def in_world(kind: str, body: Body) -> Any:
    """Runs the body in one of the worlds."""
    if kind == "threads":
        return run_now(body(blocking.WORLD))
    factory = asyncio.new_event_loop
    if kind == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(body(aio.WORLD))


class Lines(Stream):
    """Lines of bytes. A line that begins with ``!`` is a push, ``damaged`` can't be read."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._rest = b""
        self._lines: deque[bytes] = deque()
        self.next = self._next

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line == b"damaged":
                raise Broken("it sent something that is not a line")
            if line[:1] == b"!":
                if self.on_push is not None:
                    self.on_push(line[1:])
            else:
                self._lines.append(line)

    def _next(self) -> Any:
        return self._lines.popleft() if self._lines else PENDING


class Numbered(Lines):
    """Lines that begin with a number: replies may come in any order."""

    ordered = False

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._count = 0

    def send(self, request: bytes) -> Any:
        self._count += 1
        super().send(b"%d %s" % (self._count, request))
        return self._count

    def send_all(self, requests: Any) -> Any:
        return Connection.send_all(self, requests)

    def _next(self) -> Any:
        line = super()._next()
        if line is PENDING:
            return PENDING
        number, _, text = line.partition(b" ")
        return int(number), text


class Failed(Exception):
    """The error of the endpoint below."""


class LinesEndpoint:
    """A local server that speaks lines."""

    request_seconds = 30.0

    def __init__(self, port: int, kind: type[Lines] = Lines) -> None:
        self.port, self.kind = port, kind

    async def open(self, world: World, until: float) -> Lines:
        return self.kind(await open_socket(world, "127.0.0.1", self.port, until))

    def failure(self, error: OSError, seconds: float) -> Exception:
        failed = Failed(f"{type(error).__name__}: {error}")
        failed.__cause__ = error
        return failed


def echo(connection: socket.socket) -> None:
    """Sends back what it gets."""
    while data := connection.recv(65_536):
        connection.sendall(data)


def counted(connections: list[int]) -> Callable[[socket.socket], None]:
    """The same, and notes each connection."""

    def handle(connection: socket.socket) -> None:
        connections.append(connection.fileno())
        echo(connection)

    return handle


def backwards(connection: socket.socket) -> None:
    """Sends back three lines at a time, the last one first."""
    data = b""
    while more := connection.recv(65_536):
        data += more
        while data.count(b"\n") >= 3:
            *lines, data = data.split(b"\n", 3)
            connection.sendall(b"\n".join(reversed(lines)) + b"\n")
