"""Just enough of the Redis protocol to ask a server something without a client library."""

import socket
import ssl
from pathlib import Path
from typing import IO

Reply = str | int | None | list["Reply"]


class RedisError(Exception):
    """The server's own error reply."""


def ask(
    host: str,
    port: int,
    *words: str,
    trust: Path | None = None,
    password: str | None = None,
    seconds: float = 2,
) -> Reply:
    """Sends one command on a connection of its own and gives its reply."""
    with socket.create_connection((host, port), timeout=seconds) as plain:
        wire = _secure(plain, trust) if trust else plain
        with wire, wire.makefile("rb") as replies:
            if password:
                wire.sendall(_pack(("AUTH", password)))
                _read(replies)
            wire.sendall(_pack(words))
            return _read(replies)


def _secure(plain: socket.socket, trust: Path) -> socket.socket:
    context = ssl.create_default_context(cafile=trust)
    return context.wrap_socket(plain, server_hostname="localhost")


def _pack(words: tuple[str, ...]) -> bytes:
    parts = [f"*{len(words)}\r\n".encode()]
    for word in words:
        data = word.encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
    return b"".join(parts)


def _read(replies: IO[bytes]) -> Reply:
    line = replies.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("connection ended in a reply")
    mark, rest = line[:1], line[1:-2].decode()
    if mark == b"-":
        raise RedisError(rest)
    if mark == b":":
        return int(rest)
    if mark == b"$":
        return None if rest == "-1" else replies.read(int(rest) + 2)[:-2].decode()
    if mark == b"*":
        return None if rest == "-1" else [_read(replies) for _ in range(int(rest))]
    return rest
