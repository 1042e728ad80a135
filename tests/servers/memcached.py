"""memcached, for the store in examples/memcached_store."""

import getpass
import socket
from collections.abc import Sequence
from pathlib import Path

from servers.missing import program
from servers.process import Server

KEEPS = ("-M", "-F", "-o", "no_slab_reassign")
"""It evicts nothing, drops nothing to move memory, and has no flush_all."""


class MemcachedServer(Server):
    """`memcached` that evicts nothing and can't be emptied, unless `arguments` say otherwise."""

    name = "memcached"

    def __init__(self, *, arguments: Sequence[str] = KEEPS) -> None:
        super().__init__()
        self.arguments = list(arguments)

    def binary(self) -> Path:
        return program("memcached", "memcached")

    def command(self) -> list[str | Path]:
        words: list[str | Path] = [self.binary(), "-l", self.host, "-p", str(self.port), "-U", "0"]
        # As root it wants to be told as whom to run.
        return [*words, "-u", getpass.getuser(), *self.arguments]

    def answers(self) -> bool:
        return self.ask(b"version\r\n").startswith(b"VERSION ")

    def ask(self, request: bytes) -> bytes:
        """Sends one request; returns the beginning of its reply."""
        with socket.create_connection((self.host, self.port), timeout=5) as connection:
            connection.sendall(request)
            return connection.recv(65536)

    def url_at(self, port: int) -> str:
        return f"memcached://{self.host}:{port}"
