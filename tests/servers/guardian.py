"""Ends servers whose test process was killed before it could.

A small process of its own, told over a pipe which process groups and folders exist. When the pipe
ends, so has the test process, whatever happened to it: all that is left is killed and removed. (A
parent-death signal would not do: it follows the thread that started the child, and is lost when
the child changes its user.)
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

_pipe: int | None = None


def watch(word: str, what: int | Path) -> None:
    """Tells the guardian: `group` and `folder` to end one day, `gone` for a group that has."""
    global _pipe
    if _pipe is None:
        _pipe = _start()
    # A guardian that somebody killed must not fail the test that is running.
    with contextlib.suppress(BrokenPipeError):
        os.write(_pipe, f"{word} {what}\n".encode())


def _start() -> int:
    reading, writing = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(reading)
    # It outlives us by design, so nobody waits for it.
    child.returncode = 0
    return writing


def _forget_in_child() -> None:
    # A forked child that lives on must not keep its parent's pipe open.
    global _pipe
    if _pipe is not None:
        os.close(_pipe)
        _pipe = None


os.register_at_fork(after_in_child=_forget_in_child)


def guard(lines: IO[str]) -> None:
    """Reads what there is until the end of the pipe, then cleans up."""
    groups: set[int] = set()
    folders: set[str] = set()
    for line in lines:
        word, what = line.rstrip("\n").split(" ", 1)
        if word == "group":
            groups.add(int(what))
        elif word == "gone":
            groups.discard(int(what))
        else:
            folders.add(what)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    guard(sys.stdin)
