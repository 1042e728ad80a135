"""Processes of a framework that tests start, pause and kill, and the journal that they write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from servers.tree import signal_all

HERE = Path(__file__).parent
TESTS = HERE.parent
LATEST_SECONDS = 60.0


class Line(NamedTuple):
    """A line of the journal: when, which process, what, and more words."""

    at: float
    pid: int
    what: str
    words: tuple[str, ...]


class Journal:
    """A file to which all processes of a test append lines."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal"
        self.path.touch()

    def lines(self, *what: str) -> list[Line]:
        """The lines so far; with words, only lines of these kinds."""
        found = []
        for text in self.path.read_text().splitlines():
            at, pid, kind, *words = text.split()
            if not what or kind in what:
                found.append(Line(float(at), int(pid), kind, tuple(words)))
        return found


def eventually(what: str, condition: Callable[[], object]) -> None:
    """Returns when the condition holds; fails after a minute."""
    deadline = time.monotonic() + LATEST_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"did not happen in {LATEST_SECONDS} s: {what}"
        time.sleep(0.02)


class Fleet:
    """The processes of one test, each with its children; all end with the test."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.journal = folder, Journal(folder)
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(TESTS)]))
        self.environment = {
            **os.environ,
            "PYTHONPATH": path,  # with that of the mutants, whose code is a copy
            "JOURNAL": str(self.journal.path),
            **environment,
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, arguments: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """Starts a Python program or module."""
        log = (self.folder / f"log-{len(self.processes)}").open("w")
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environment | environment,
            cwd=self.folder,
            stdout=log,
            stderr=log,
        )
        log.close()
        self.processes.append(process)
        return process

    def end(self) -> None:
        """Kills every process that is left, and shows what all of them have logged."""
        for process in self.processes:
            signal_all(process.pid, signal.SIGKILL)
            process.wait()
        for number in range(len(self.processes)):
            print((self.folder / f"log-{number}").read_text()[-8000:])
        print(self.journal.path.read_text()[-8000:])


@contextmanager
def fleet(folder: Path, **environment: str) -> Iterator[Fleet]:
    processes = Fleet(folder, **environment)
    try:
        yield processes
    finally:
        processes.end()
