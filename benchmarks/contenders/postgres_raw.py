"""PostgreSQL's protocol without a client: replaying a recording, and reading one."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.tape import Recording, dial, replayer

__all__ = ["RawPostgres", "Used", "complete", "replay", "statements"]


_PREPARED = re.compile(rb"PREPARE (\S+) AS (.*?)(?=; PREPARE|$)", re.DOTALL)


def complete(reply: bytes) -> bool:
    """Whether the server is ready for the next request."""
    return reply[-6:-1] == b"Z\0\0\0\5"


def replay(url: str, tape: Recording) -> list[Any]:
    """Logs in as the recorded client did (``N``: no TLS here), and answers its hold's steps."""
    sock = dial(url)
    for exchange in tape.prologue:
        replayer(sock, [exchange], lambda reply: complete(reply) or reply == b"N")()
    return [replayer(sock, [exchange], complete) for exchange in tape.hold]


class Used(NamedTuple):
    """A statement of a recording, with its parameters."""

    sql: bytes
    parameters: list[bytes | None]


def _messages(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    if data[:1] not in (b"P", b"B", b"Q", b"D", b"E", b"S", b"C", b"X", b"H"):
        at = struct.unpack_from("!i", data)[0]  # the start-up message has no type
    while at < len(data):
        size = struct.unpack_from("!i", data, at + 1)[0]
        yield data[at : at + 1], data[at + 5 : at + 1 + size]
        at += 1 + size


def statements(tape: Recording) -> list[Used]:
    """What a hold executes, in order."""
    named: dict[bytes, bytes] = {}
    used: list[Used] = []
    for number, (request, _) in enumerate([*tape.prologue, *tape.hold]):
        for kind, body in _messages(request):
            if kind == b"P":
                name, sql, _ = body.split(b"\0", 2)
                named[name] = sql
            elif kind == b"B" and number >= len(tape.prologue):
                _, name, rest = body.split(b"\0", 2)
                used.append(Used(named[name], list(_parameters(rest))))
            elif kind == b"Q" and number >= len(tape.prologue):
                used.append(Used(body.rstrip(b"\0"), []))
            elif kind == b"Q":
                named.update(_PREPARED.findall(body.rstrip(b"\0")))
    return used


def _parameters(rest: bytes) -> Iterator[bytes | None]:
    formats = struct.unpack_from("!h", rest)[0]
    if any(struct.unpack_from(f"!{formats}h", rest, 2)):
        raise ValueError("binary parameters can't be given to another client")
    at = 2 + 2 * formats
    count = struct.unpack_from("!h", rest, at)[0]
    at += 2
    for _ in range(count):
        size = struct.unpack_from("!i", rest, at)[0]
        at += 4
        yield None if size < 0 else rest[at : at + size]
        at += max(0, size)


class RawPostgres:
    """A bare connection that sends statements packed ahead; trust is all the login it knows."""

    def __init__(self, url: str, user: str, database: str) -> None:
        self._sock = dial(url)
        words = f"user\0{user}\0database\0{database}\0\0".encode()
        self.send(struct.pack("!ii", 8 + len(words), 196_608) + words)

    @staticmethod
    def pack(sql: str) -> bytes:
        data = sql.encode() + b"\0"
        return b"Q" + struct.pack("!i", 4 + len(data)) + data

    def send(self, packed: bytes) -> None:
        self._sock.sendall(packed)
        reply = self._sock.recv(65536)
        while not complete(reply):
            reply += self._sock.recv(65536)
        if reply[:1] == b"E":
            raise RuntimeError(reply.decode(errors="replace"))

    def close(self) -> None:
        self._sock.close()
