"""Two workers and one queue: every job is done, and none twice.

Each job has a lock of its own. A worker that finds one taken goes on to the next; what it takes it
marks as done in one transaction, behind the job's fence.

    python examples/two_workers.py
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

from scene import Scene, arguments, processes

from holdfast import Lease, fencing

JOBS = 30


def worker(number: int, scene: Scene, path: str) -> None:
    with scene.connect() as locks, closing(sqlite3.connect(path, timeout=30)) as queue:
        while pending := queue.execute("SELECT id FROM job WHERE NOT done").fetchall():
            for (job,) in pending:
                lease = locks.lock(f"job:{job}").acquire(blocking=False)
                if lease is not None:
                    try:
                        do(queue, job, number, lease)
                    finally:
                        lease.release()


def do(queue: sqlite3.Connection, job: int, worker: int, lease: Lease) -> None:
    with queue:
        fencing.sql.guard(queue, f"job:{job}", lease)
        (done,) = queue.execute("SELECT done FROM job WHERE id = ?", (job,)).fetchone()
        if not done:  # it was pending when we looked, and may not be any more
            queue.execute("UPDATE job SET done = 1 WHERE id = ?", (job,))
            queue.execute("INSERT INTO log VALUES (?, ?)", (job, worker))


def main() -> None:
    options = arguments("Two workers and one queue.").parse_args()
    scene = Scene(options.url, options.ttl)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "queue.db")
        with closing(sqlite3.connect(path)) as queue, queue:
            queue.execute("PRAGMA journal_mode = WAL")
            queue.execute("CREATE TABLE job (id INTEGER PRIMARY KEY, done INTEGER)")
            queue.execute("CREATE TABLE log (job INTEGER, worker INTEGER)")
            queue.executemany("INSERT INTO job VALUES (?, 0)", [(job,) for job in range(JOBS)])
        for process in processes(2, worker, scene, path):
            process.join()
        with closing(sqlite3.connect(path)) as queue:
            log = queue.execute("SELECT job, worker FROM log").fetchall()
    shares = Counter(worker for _, worker in log)
    twice = len(log) - len({job for job, _ in log})
    print(
        f"{len(log)} of {JOBS} jobs done, {twice} twice; by worker: {dict(sorted(shares.items()))}"
    )
    assert len(log) == JOBS
    assert twice == 0


if __name__ == "__main__":
    main()
