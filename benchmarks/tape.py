"""Records what Holdfast sends for one hold, byte for byte, so that a bare socket can replay it.

That makes the limit exact: the same requests, whatever they are today, without the client. The
client that was recorded stays open, since sessions of its own may be named in the recording.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import holdfast

__all__ = ["Exchange", "Recording", "Relay", "at_port", "dial", "record"]

Exchange = tuple[bytes, bytes]
WARM_HOLDS = 5
APART_SECONDS = 0.05


def at_port(url: str, port: int) -> str:
    """The same URL with another port."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{login[0]}{login[1]}{parts.hostname}:{port}"))


def dial(url: str) -> socket.socket:
    """A bare connection to the URL's host and port."""
    parts = urlsplit(url)
    sock = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 0))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


@dataclass
class Line:
    """What went through one connection, as requests with their replies."""

    exchanges: list[tuple[bytearray, bytearray]] = field(default_factory=list)
    sent_at: list[float] = field(default_factory=list)
    """When something was sent, by the machine's monotonic clock."""

    def sent(self, data: bytes) -> None:
        self.sent_at.append(time.monotonic())
        if not self.exchanges or self.exchanges[-1][1]:
            self.exchanges.append((bytearray(), bytearray()))
        self.exchanges[-1][0].extend(data)

    def received(self, data: bytes) -> None:
        if not self.exchanges:
            self.exchanges.append((bytearray(), bytearray()))
        self.exchanges[-1][1].extend(data)


class Relay:
    """A way to a server that remembers what went through it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = at_port(url, self._listener.getsockname()[1])
        self.lines: list[Line] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def turns(self) -> int:
        """How many requests went through, a batch that is answered at once counted as one."""
        return sum(len(line.exchanges) for line in self.lines)

    def batches(self, start: float, end: float) -> int:
        """How many times something was sent in this span, what is close together counted once:
        a long batch goes out in pieces."""
        times = sorted(at for line in self.lines for at in line.sent_at if start <= at <= end)
        return sum(later - sooner > APART_SECONDS for sooner, later in pairwise([-1.0, *times]))

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = Line()
            self.lines.append(line)
            threading.Thread(target=_pump, args=(client, server, line), daemon=True).start()

    def close(self) -> None:
        self._listener.close()


def _pump(client: socket.socket, server: socket.socket, line: Line) -> None:
    ways = {client: (server, line.sent), server: (client, line.received)}
    while True:
        try:
            for sock in select.select(list(ways), [], [])[0]:
                other, note = ways[sock]
                data = sock.recv(1 << 16)
                if not data:
                    raise OSError
                note(data)
                other.sendall(data)
        except (OSError, ValueError):
            client.close()
            server.close()
            return


@dataclass
class Recording:
    """One connection's way to one hold."""

    prologue: list[Exchange]
    """All before the hold: logging in, preparing statements."""
    hold: list[Exchange]
    recorded: Any
    """Kept open."""


def record(url: str, namespace: str) -> Recording:
    """Takes and releases a lock through a relay until it is warm, and records the last time."""
    relay = Relay(url)
    recorded = holdfast.connect(relay.url, namespace=f"{namespace}-limit")
    lock = recorded.lock("benchmark")
    marks: list[int] = []
    for _ in range(WARM_HOLDS):
        marks = [len(line.exchanges) for line in relay.lines]
        with lock:
            pass
    grown = [
        (line, mark)
        for line, mark in zip(relay.lines, marks, strict=False)
        if len(line.exchanges) > mark
    ]
    if len(grown) != 1:
        raise RuntimeError(f"one hold used {len(grown)} connections: it can't be replayed")
    line, mark = grown[0]
    whole = [(bytes(request), bytes(reply)) for request, reply in line.exchanges]
    return Recording(whole[:mark], whole[mark:], recorded)


def replayer(
    sock: socket.socket, exchanges: list[Exchange], complete: Callable[[bytes], bool]
) -> Callable[[], None]:
    """A function that sends these requests again and reads their replies to the end."""
    requests = [request for request, _ in exchanges]
    send, receive = sock.sendall, sock.recv

    def replay() -> None:
        for request in requests:
            send(request)
            reply = receive(65536)
            while not complete(reply):
                more = receive(65536)
                if not more:
                    raise ConnectionError("the server closed the connection")
                reply += more

    return replay
