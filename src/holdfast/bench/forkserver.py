"""A process that has imported everything and forks one child for each job.

Forking is faster than importing a dozen client libraries in each of sixteen processes. A child
that does not end in time is killed with all its processes and reported as hung.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

__all__ = ["ForkServer", "in_child"]

PR_SET_PDEATHSIG = 1
REHEARSAL_SECONDS = 15.0
CASES = {
    # case: where its function is; it gets the book and the job's words
    "uncontended": "holdfast.bench.jobs:uncontended_job",
    "contended": "holdfast.bench.contended:contended_job",
    "drain": "holdfast.bench.drain:drain_job",
    "held": "holdfast.bench.held:held_job",
    "growth": "holdfast.bench.growth:growth_job",
}


_rehearsed: set[str] = set()


class ForkServer:
    """The handle on such a process; ``run`` does one job after the other."""

    def __init__(self, book: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "holdfast.bench.forkserver", book],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, case: str, *, allowed: float, **words: Any) -> Any:
        """What the job answered, or ``{"error": …}``; it is killed after the seconds allowed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"case": case, "allowed": allowed, **words}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "the measuring process ended"}

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def in_child(work: Callable[[int], Any]) -> tuple[int, int]:
    """Forks a child that does the work; answers its number and where its answer can be read.

    The work is given the pipe that its answer goes to, for words before it."""
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    _die_with(parent)
    try:
        answer = work(writer)
    except BaseException as error:  # noqa: BLE001 - sent to the parent
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    with suppress(OSError), os.fdopen(writer, "w") as pipe:
        json.dump(answer, pipe)
    # No destructors: a peer's threads and loops may hang in them.
    os._exit(0)


def _die_with(parent: int) -> None:
    """Ends this process with its parent: what is measured may spin for ever."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def read_by(reader: int, deadline: float) -> bytes | None:
    """All that a child wrote, or ``None`` if it had not ended by then."""
    parts: list[bytes] = []
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while True:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                return None
            part = pipe.read(65536)
            if not part:
                return b"".join(parts)
            parts.append(part)


def _grouped(work: Callable[[], Any]) -> Callable[[int], Any]:
    def run(_: int) -> Any:
        os.setpgid(0, 0)
        return work()

    return run


def _rehearse(book: Any, key: str, target: list[Any]) -> None:
    """Imports here what a contender imports when it is first used, so that no child has to.

    A child tries it out and tells which modules that took: this process itself never opens
    anything that a fork would share."""

    def tried(_: int) -> Any:
        from holdfast.bench.rehearsal import rehearse

        before = dict(os.environ)
        rehearse(book, key, target)
        changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
        return [changed, list(sys.modules)]

    pid, reader = in_child(tried)
    said = read_by(reader, time.monotonic() + REHEARSAL_SECONDS)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    answer = json.loads(said) if said else {}
    if isinstance(answer, list):
        os.environ.update(answer[0])
        for name in answer[1]:
            if name not in sys.modules and name != "__main__":
                with suppress(Exception):
                    importlib.import_module(name)


def _do(book: Any, job: dict[str, Any]) -> Any:
    case, seconds = job.pop("case"), job.pop("allowed")
    if case == "contended" and (key := job["contender"]) not in _rehearsed:
        _rehearsed.add(key)
        _rehearse(book, key, job["target"])
    module, name = {**CASES, **getattr(book, "CASES", {})}[case].split(":")
    function = getattr(importlib.import_module(module), name)
    pid, reader = in_child(_grouped(lambda: function(book, **job)))
    said = read_by(reader, time.monotonic() + seconds)
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if said is None:
        return {"error": f"hung: killed after {seconds:g} s"}
    return json.loads(said) if said else {"error": "it died without a word"}


def main(module: str) -> None:
    """Reads jobs, a line each, and answers each with a line."""
    book = importlib.import_module(module)
    book.contenders()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints must not be taken for an answer
    for line in sys.stdin:
        answers.write(json.dumps(_do(book, json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
