"""Everybody on one ZooKeeper."""

from __future__ import annotations

import select
import struct
from typing import Any
from urllib.parse import urlsplit

from benchmarks.contenders.common import ALL, ALONE, WAITS, split
from benchmarks.tape import dial
from holdfast.bench.contender import (
    CONTENDED,
    UNCONTENDED,
    Client,
    Contender,
    Opener,
    Pair,
    Target,
    ours,
)

__all__ = ["CONTENDERS"]

CREATE, DELETE, EXISTS, CHILDREN, PING = 1, 2, 3, 8, 11
EPHEMERAL, EPHEMERAL_SEQUENTIAL = 1, 3
SESSION_MS = 30_000


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("!i", len(data)) + data


def _framed(body: bytes) -> bytes:
    return struct.pack("!i", len(body)) + body


def _create(path: str, flags: int) -> bytes:
    acl = struct.pack("!ii", 1, 31) + _text("world") + _text("anyone")
    return struct.pack("!ii", 1, CREATE) + _text(path) + _text("") + acl + struct.pack("!i", flags)


def _delete(path: str) -> bytes:
    return struct.pack("!ii", 1, DELETE) + _text(path) + struct.pack("!i", -1)


def _look(kind: int, path: str, watch: bool) -> bytes:
    return struct.pack("!ii", 1, kind) + _text(path) + bytes([watch])


class RawZooKeeper:
    """One session over a bare socket. Events of watches come between the answers."""

    def __init__(self, url: str) -> None:
        self._sock = dial(url)
        self._unread = b""
        self.events = 0
        hello = struct.pack("!iqiq", 0, 0, SESSION_MS, 0) + _text("\0" * 16) + b"\0"
        self._sock.sendall(_framed(hello))
        self._frame()

    def _frame(self) -> bytes:
        while len(self._unread) < 4 or len(self._unread) < 4 + self._size():
            more = self._sock.recv(65536)
            if not more:
                raise ConnectionError("the server closed the connection")
            self._unread += more
        size = self._size()
        frame, self._unread = self._unread[4 : 4 + size], self._unread[4 + size :]
        return frame

    def _size(self) -> int:
        return int.from_bytes(self._unread[:4], "big")

    def send(self, *bodies: bytes) -> list[bytes]:
        """The answers, in order; raises for none of them: callers look at what they need."""
        self._sock.sendall(b"".join(map(_framed, bodies)))
        found: list[bytes] = []
        while len(found) < len(bodies):
            frame = self._frame()
            if frame[:4] == b"\xff\xff\xff\xff":
                self.events += 1
            elif frame[:4] != b"\xff\xff\xff\xfe":
                found.append(frame)
        return found

    def wait(self) -> None:
        """Returns after the next event; pings while there is none."""
        seen = self.events
        while self.events == seen:
            if not self._unread and not select.select([self._sock], [], [], SESSION_MS / 3000)[0]:
                self._sock.sendall(_framed(struct.pack("!ii", -2, PING)))
            elif self._frame()[:4] == b"\xff\xff\xff\xff":
                self.events += 1

    def close(self) -> None:
        self._sock.close()


def _made(wire: RawZooKeeper, path: str) -> None:
    at = ""
    for part in path.strip("/").split("/"):
        at += f"/{part}"
        wire.send(_create(at, 0))


def _answer_text(frame: bytes, at: int = 16) -> str:
    size = int.from_bytes(frame[at : at + 4], "big")
    return frame[at + 4 : at + 4 + size].decode()


def _least(target: Target) -> Client:
    """Create an ephemeral node, delete it: no line, no fence."""
    wire = RawZooKeeper(target.url)
    _made(wire, f"/{target.namespace}")
    path = f"/{target.namespace}/least"
    take, free = _create(path, EPHEMERAL), _delete(path)
    return split([lambda: wire.send(take), lambda: wire.send(free)], wire.close)


def _queue(target: Target) -> Client:
    """The queue recipe: create and list back to back, watch who is in front, delete."""

    def lock(name: str) -> Pair:
        wire = RawZooKeeper(target.url)
        parent = f"/{target.namespace}/raw-{name}"
        _made(wire, parent)
        create, listing = (
            _create(f"{parent}/n", EPHEMERAL_SEQUENTIAL),
            _look(CHILDREN, parent, False),
        )
        mine: list[str] = []

        def acquire() -> int:
            made, listed = wire.send(create, listing)
            path = _answer_text(made)
            mine.append(path)
            own = path.rpartition("/")[2]
            while True:
                front = [child for child in _children(listed) if child < own]
                if not front:
                    return int(own[1:]) + 1
                (found,) = wire.send(_look(EXISTS, f"{parent}/{max(front)}", True))
                if found[12:16] == b"\0\0\0\0":
                    wire.wait()
                (listed,) = wire.send(listing)

        return Pair(acquire, lambda: wire.send(_delete(mine.pop())))

    return Client(lock, lambda: None)


def _children(frame: bytes) -> list[str]:
    count, at, found = int.from_bytes(frame[16:20], "big"), 20, []
    for _ in range(count):
        found.append(_answer_text(frame, at))
        at += 4 + len(found[-1].encode())
    return found


def _client(target: Target) -> Any:
    from kazoo.client import KazooClient

    parts = urlsplit(target.url)
    client = KazooClient(hosts=f"{parts.hostname}:{parts.port}", timeout=10)
    client.start()
    return client


def _library(target: Target) -> Client:
    """kazoo's own create and delete."""
    client = _client(target)
    path = f"/{target.namespace}/kazoo"
    client.ensure_path(f"/{target.namespace}")
    return split(
        [lambda: client.create(path, ephemeral=True), lambda: client.delete(path)], client.stop
    )


def _kazoo(target: Target) -> Client:
    client = _client(target)

    def lock(name: str) -> Pair:
        made = client.Lock(f"/{target.namespace}/kazoo-{name}")
        return Pair(made.acquire, made.release)

    return Client(lock, client.stop)


def _tooz(target: Target) -> Client:
    from tooz import coordination

    parts = urlsplit(target.url)
    coordinator = coordination.get_coordinator(
        f"zookeeper://{parts.hostname}:{parts.port}", b"benchmark"
    )
    coordinator.start()

    def lock(name: str) -> Pair:
        made = coordinator.get_lock(name.encode())
        return Pair(made.acquire, made.release)

    return Client(lock, coordinator.stop)


def _one(
    name: str, role: Any, open_: Opener, cases: frozenset[str] = WAITS, held: Opener | None = None
) -> Contender:
    return Contender(name, "zookeeper", role, "blocking", open_, cases, held)


CONTENDERS = [
    _one("raw socket, queue recipe", "limit", _queue, frozenset({UNCONTENDED, CONTENDED})),
    _one("raw socket, create and delete", "least", _least, ALONE),
    _one("kazoo create and delete", "library", _library, ALONE),
    *ours("zookeeper"),
    _one("kazoo Lock", "peer", _kazoo, ALL, _kazoo),
    _one("tooz zookeeper", "peer", _tooz),
]
