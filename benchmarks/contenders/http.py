"""HTTP without a client: requests packed ahead, replies read to their end."""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks.tape import dial

__all__ = ["RawHttp", "complete", "request"]

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def complete(reply: bytes) -> bool:
    """Whether a reply is whole, by its length or its last chunk."""
    head, found, body = reply.partition(b"\r\n\r\n")
    if not found:
        return False
    length = _LENGTH.search(head)
    if length is None:
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(length[1])


def request(method: str, path: str, body: Any = None) -> bytes:
    """One request as it goes over the wire."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


class RawHttp:
    """One connection."""

    def __init__(self, url: str) -> None:
        self._sock = dial(url)

    def send(self, packed: bytes) -> bytes:
        """The reply's body."""
        self._sock.sendall(packed)
        reply = self._sock.recv(65536)
        while not complete(reply):
            more = self._sock.recv(65536)
            if not more:
                raise ConnectionError("the server closed the connection")
            reply += more
        return reply.partition(b"\r\n\r\n")[2]

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """A reply that is read as JSON."""
        return json.loads(self.send(request(method, path, body)))

    def close(self) -> None:
        self._sock.close()
