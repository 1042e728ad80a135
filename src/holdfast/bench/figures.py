"""What is read off a process while it is measured: percentiles, processor time, threads, cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = [
    "connections_to",
    "cpu_seconds",
    "memory_megabytes",
    "percentile",
    "pinned",
    "process_tree",
    "thread_count",
]

PROC = Path("/proc")


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that this share of all lies at or below.

    >>> percentile([3, 1, 2], 0.5), percentile([], 0.99)
    (2, None)
    """
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _files(pattern: str) -> list[Path]:
    with suppress(OSError):  # it ended while we looked
        return list(PROC.glob(pattern))
    return []


def process_tree(roots: Iterable[int]) -> list[int]:
    """These processes and all that descend from them; only Linux tells."""
    found, open_ = [], list(roots)
    while open_:
        pid = open_.pop()
        found.append(pid)
        for file in _files(f"{pid}/task/*/children"):
            with suppress(OSError):
                open_.extend(map(int, file.read_text().split()))
    return found


def cpu_seconds(roots: Iterable[int]) -> float:
    """Processor time of whole process trees so far, to the nanosecond where Linux tells."""
    total = 0
    for pid in process_tree(roots):
        for file in _files(f"{pid}/task/*/schedstat"):
            with suppress(OSError, ValueError, IndexError):
                total += int(file.read_text().split()[0])
    return total / 1e9


@contextmanager
def pinned(roots: Iterable[int]) -> Iterator[None]:
    """This process and a server share one core during the block.

    Left free, a wake-up between two cores costs more than any client, and hides what it costs.
    """
    if sys.platform != "linux":
        yield
        return
    before = os.sched_getaffinity(0)
    tasks = [0, *_tasks(roots)]
    try:
        _settle(tasks, {max(before)})
        yield
    finally:
        _settle([0, *_tasks(roots), *_tasks([os.getpid()])], before)


def _tasks(roots: Iterable[int]) -> list[int]:
    pids = process_tree(roots)
    return [int(task.name) for pid in pids for task in _files(f"{pid}/task/*")]


def _settle(tasks: Iterable[int], cores: set[int]) -> None:
    for task in tasks:
        with suppress(OSError):
            os.sched_setaffinity(task, cores)


def connections_to(port: int) -> int:
    """How many connections this machine has open to a port of its own."""
    count, wanted = 0, f":{port:04X}"
    for table in ("net/tcp", "net/tcp6"):
        with suppress(OSError):
            for line in (PROC / table).read_text().splitlines()[1:]:
                words = line.split()
                count += words[2].endswith(wanted) and words[3] == "01"
    return count


def thread_count() -> int:
    """Threads of this process, also those that Python does not know."""
    return len(_files("self/task/*"))


def memory_megabytes() -> float:
    """What this process keeps in memory."""
    with suppress(OSError):
        pages = int((PROC / "self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0
