"""The command in real processes, on an embedded store of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HANG_SECONDS = 60.0
"""After so long a test fails instead of hanging; nothing is measured against it."""


class Cli:
    """Runs ``holdfast`` against one store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = [sys.executable, "-m", "holdfast"]
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")},
            "HOLDFAST_URL": f"sqlite:///{folder}/locks.db",
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder),
            "XDG_RUNTIME_DIR": str(folder),
        }
        self._started: list[subprocess.Popen[str]] = []

    def __call__(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a verb to its end."""
        environment = {**self.environment, **options.pop("env", {})}
        return subprocess.run(
            [*self.command, *arguments],
            env=environment,
            text=True,
            capture_output=True,
            stdin=options.pop("stdin", subprocess.DEVNULL),
            timeout=HANG_SECONDS,
            **options,
        )

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a verb with pipes for its streams."""
        process = subprocess.Popen(
            [*self.command, *arguments],
            env={**self.environment, **options.pop("env", {})},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )
        self._started.append(process)
        return process

    def hold(self, name: str, *options: str) -> subprocess.Popen[str]:
        """Holds a name until ``let_go``."""
        process = self.start("run", name, *options, "--", "sh", "-c", "echo held; read line")
        line = read_line(process)
        assert line == "held\n", process.communicate()[1]
        return process

    def let_go(self, process: subprocess.Popen[str]) -> None:
        """Ends ``hold``."""
        process.communicate("\n", timeout=HANG_SECONDS)

    def show(self, name: str) -> Any:
        """Who holds and who waits, as data."""
        return json.loads(self("show", name, "--json").stdout)

    def listed(self) -> Any:
        """All names in use, as data."""
        return json.loads(self("ls", "--json").stdout)

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=HANG_SECONDS)


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line of its standard output."""
    assert process.stdout is not None
    return process.stdout.readline()


def until(condition: Callable[[], object]) -> None:
    """Waits for something that another process does."""
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def guardian_of(process: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


def read_to_the_end(process: subprocess.Popen[str]) -> None:
    """Returns when nobody has its standard output open: all of the group are gone."""
    assert process.stdout is not None
    process.stdout.read()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
