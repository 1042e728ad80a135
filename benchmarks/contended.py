"""Many processes on one lock, 1 ms holds: rate, fairness, longest wait, and no overlap."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from holdfast.testing.history import fairness, faults, read_holds

__all__ = ["Contention", "contend"]

WORKER = """
import sys, time
from pathlib import Path
import holdfast
from holdfast.testing.history import Recorder

url, path, number, start, seconds = sys.argv[1:]
recorder = Recorder(Path(path), number)
locks = holdfast.connect(url)
lock = locks.lock("benchmark")
time.sleep(max(0.0, float(start) - time.time()))
end, turn = time.monotonic() + float(seconds), 0
while time.monotonic() < end:
    turn += 1
    recorder.asked(str(turn), "benchmark")
    with lock as lease:
        recorder.held(str(turn), lease.token, lease.remaining)
        time.sleep(0.001)
        recorder.ended(str(turn))
locks.close()
"""


class Contention(NamedTuple):
    """What the processes of one store reached together."""

    per_second: float
    fewest_to_most: float
    longest_wait: float
    faults: list[str]


def contend(url: str, *, processes: int = 16, seconds: float = 10.0) -> Contention:
    """Runs the processes and judges their recorded history."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.jsonl"
        start = time.time() + 3.0
        words = [url, str(path)]
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, *words, str(n), str(start), str(seconds)]
            )
            for n in range(processes)
        ]
        for worker in workers:
            if worker.wait():
                raise RuntimeError(f"a worker failed with code {worker.returncode}")
        holds = read_holds(path)
    return Contention(
        len(holds) / seconds,
        fairness(holds, map(str, range(processes))),
        max((hold.held - hold.asked for hold in holds), default=0.0),
        faults(holds),
    )
