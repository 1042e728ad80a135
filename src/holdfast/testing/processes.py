"""Real processes: where the subject is exclusion, threads prove nothing.

A ``Process`` is a worker that can be asked, killed with -9, stopped and continued.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

from holdfast.testing.rules import Flavour

__all__ = ["Process", "ProcessFailed"]

ANSWER_SECONDS = 60.0


class ProcessFailed(AssertionError):
    """A worker raised, ended or did not answer; the message carries what it said."""

    def __init__(self, message: str, error: str = "") -> None:
        super().__init__(message)
        self.error = error
        """The type's name, if it was an exception of the worker's."""


class Process:
    """One worker process with a client of its own."""

    def __init__(self, url: str, flavour: Flavour, **options: Any) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "holdfast.testing.worker", json.dumps([url, flavour, options])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        """What it is called in histories."""
        return f"pid {self.pid}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def send(self, verb: str, **options: Any) -> None:
        """Tells it to do something; ``answer`` is what comes of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, options]) + "\n")
        self._process.stdin.flush()

    async def answer(self, seconds: float = ANSWER_SECONDS) -> Any:
        """What the oldest unanswered verb returned; raises ``ProcessFailed``."""
        try:
            line = await asyncio.to_thread(self._lines.get, True, seconds)
        except queue.Empty:
            raise ProcessFailed(f"no answer in {seconds} s; it said:\n{self.said()}") from None
        if not line:
            raise ProcessFailed(f"it ended without an answer; it said:\n{self.said()}")
        reply = json.loads(line)
        if "error" in reply:
            raise ProcessFailed(reply["detail"], reply["error"])
        return reply["answer"]

    async def ask(self, verb: str, **options: Any) -> Any:
        """Tells it to do something and waits for what comes of it."""
        self.send(verb, **options)
        return await self.answer()

    def stop(self) -> None:
        """SIGSTOP: it does not run until ``go_on``."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        self._process.kill()
        self._process.wait()

    async def leave(self) -> int:
        """Lets it end by itself, holding what it holds; its exit code."""
        self.send("leave")
        return await asyncio.to_thread(self._process.wait, ANSWER_SECONDS)

    def said(self) -> str:
        """What it wrote to standard error."""
        self._said.seek(0)
        return self._said.read().decode(errors="replace")

    def close(self) -> None:
        """Ends it, if it still runs, and what belongs to it."""
        if self._process.poll() is None:
            self.kill()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was written and never read is lost
                    pipe.close()
