"""A process and its children. PostgreSQL's backends leave its process group, so a signal to the
group is not enough to pause or kill it."""

import contextlib
import os
import signal
import time
from pathlib import Path

_GONE_SECONDS = 5.0


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, as they are now."""
    parents = _parents()
    found: list[int] = []
    heads = {pid}
    while heads:
        heads = {child for child, parent in parents.items() if parent in heads}
        found.extend(heads)
    return found


def signal_all(pid: int, which: signal.Signals) -> None:
    """Signals the process and its descendants; it is stopped first, so that it starts no more."""
    with contextlib.suppress(ProcessLookupError):
        if which is not signal.SIGCONT:
            os.kill(pid, signal.SIGSTOP)
        for each in [pid, *descendants(pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, which)


def wait_gone(pids: list[int]) -> None:
    """Returns when none of them runs any more: shared memory and ports are free again."""
    deadline = time.monotonic() + _GONE_SECONDS
    while time.monotonic() < deadline and any(runs(pid) for pid in pids):
        time.sleep(0.005)


def _parents() -> dict[int, int]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(folder.name)] = int(_fields(folder)[1])
    return found


def runs(pid: int) -> bool:
    """Whether the process is there; a zombie, which only waits to be reaped, is not."""
    with contextlib.suppress(OSError):
        return _fields(Path("/proc") / str(pid))[0] != "Z"
    return False


def _fields(folder: Path) -> list[str]:
    # The program's name comes before these, in brackets, and may contain anything.
    return (folder / "stat").read_text().rpartition(")")[2].split()
