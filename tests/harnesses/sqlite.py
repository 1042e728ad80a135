"""``sqlite:///path``: a file, and a process that can stop in the middle of a transaction."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from holdfast.testing import Harness, Knob

__all__ = ["HARNESSES"]

# Stops the store as a stopped process would: with the file's write lock in its hand.
_STOPPER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=10, isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("stopped", flush=True)
sys.stdin.read()
connection.execute("ROLLBACK")
connection.close()
"""


class SqliteHarness(Harness):
    """One file in a folder of its own."""

    name = "sqlite"
    ttl = 0.3
    knobs = frozenset({Knob.PAUSE})

    def __init__(self) -> None:
        self._stopper: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-sqlite-")
        self._path = f"{self._folder.name}/locks.db"
        self.url = f"sqlite://{self._path}"

    def stop(self) -> None:
        self.heal()
        self._folder.cleanup()

    def pause(self) -> None:
        stopper = subprocess.Popen(
            [sys.executable, "-c", _STOPPER, self._path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._stopper = stopper
        assert stopper.stdout is not None
        assert stopper.stdout.readline() == b"stopped\n"

    def resume(self) -> None:
        stopper, self._stopper = self._stopper, None
        if stopper is not None:
            stopper.communicate(timeout=10)

    def heal(self) -> None:
        self.resume()


HARNESSES = (SqliteHarness,)
