"""Helpers for the tests of the embedded store: claims, backends, other processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from holdfast.claim import Busy, Claim, Grant
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.sqlite.backend import SqliteBackend, SqliteStore
from holdfast.url import open_store
from stores.claims import claim_of as claim

__all__ = ["Program", "backend_of", "claim", "expire", "grant", "store_of", "take", "try_to_take"]


def store_of(path: Path, request_seconds: float = 5.0, options: str = "") -> SqliteStore:
    """The store in a file, through its URL."""
    store = open_store(f"sqlite://{path}{options}", Settings(request_seconds=request_seconds))
    assert isinstance(store, SqliteStore)
    return store


@contextmanager
def backend_of(
    path: Path, request_seconds: float = 5.0, options: str = ""
) -> Iterator[SqliteBackend]:
    """A blocking backend of a file."""
    backend = store_of(path, request_seconds, options).backend(BlockingRuntime())
    try:
        yield backend
    finally:
        run_now(backend.close())


def expire(backend: SqliteBackend) -> None:
    """Ends the ttl of all exclusive holds now."""
    connection = backend._connection._database
    assert connection is not None
    connection.execute("UPDATE name SET ends = ?", (now(),))


def try_to_take(backend: SqliteBackend, asked: Claim, *, join: bool = True) -> Grant | Busy:
    """One attempt."""
    return run_now(backend.attempt(asked, join=join))


def grant(answer: Grant | Busy) -> Grant:
    """The answer, which must be a grant."""
    assert isinstance(answer, Grant), answer
    return answer


def take(backend: SqliteBackend, asked: Claim | None = None) -> Grant:
    """An attempt that must succeed."""
    return grant(try_to_take(backend, asked or claim()))


class Program:
    """A Python process that runs the given lines, which print words and wait at ``input()``.

    The lines may use ``path``, ``backend_of``, ``claim``, ``take`` and ``try_to_take``.
    """

    _PRELUDE = (
        "import os, sqlite3, sys, time\n"
        "from pathlib import Path\n"
        "from stores.sqlite.helpers import *\n"
        "from holdfast.core.drive import run_now\n"
        "path = Path(sys.argv[1])\n"
    )

    def __init__(self, path: Path, lines: str) -> None:
        tests = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-c", self._PRELUDE + lines, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tests,
        )

    def says(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        """Ends its ``input()``."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """Closes its input and waits for its end. Returns its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(30)
        self._close()
        return code

    def kill(self) -> None:
        """As by ``kill -9``."""
        self.process.kill()
        self.process.wait(30)
        self._close()

    def _close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
