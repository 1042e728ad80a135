"""A migration at the start of four web workers: one runs it, the others wait for it.

The first worker dies in the middle. Its transaction is gone with it; another one takes over, with
a higher token, and is told so.

    python examples/migration.py
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from scene import Queue, Scene, arguments, processes

from holdfast import Lease, fencing

WORKERS = 4


def web_worker(number: int, scene: Scene, path: str, told: Any) -> None:
    def migrate(lease: Lease) -> str:
        with closing(sqlite3.connect(path, timeout=30)) as database, database:
            fencing.sql.guard(database, lease.name, lease)
            database.execute("ALTER TABLE customer ADD COLUMN email TEXT")
            if not Path(path + ".crashed").exists():
                Path(path + ".crashed").touch()
                os._exit(1)  # as if by the kernel's out-of-memory killer
        return "customer.email"

    with scene.connect() as locks:
        outcome = locks.once("migration:0007", keep=365 * 24 * 3600).run(migrate)
        told.put((number, outcome.ran, outcome.took_over, outcome.value))


def main() -> None:
    options = arguments("A migration at the start of N web workers.", ttl=5.0).parse_args()
    scene, told = Scene(options.url, options.ttl, "RECORDS"), Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "shop.db")
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE customer (name TEXT)")
        workers = processes(WORKERS, web_worker, scene, path, told)
        answers = [told.get(timeout=120) for _ in range(WORKERS - 1)]
        for process in workers:
            process.join()
        with closing(sqlite3.connect(path)) as database:
            columns = [row[1] for row in database.execute("PRAGMA table_info(customer)")]
    for number, ran, took_over, _ in sorted(answers):
        how = f"ran it, taking over from token {took_over}" if ran else "waited for it"
        print(f"worker {number} {how}, and serves")
    print(f"columns: {columns}; one worker crashed in the middle of it")
    assert sum(ran for _, ran, _, _ in answers) == 1
    assert columns == ["name", "email"]


if __name__ == "__main__":
    main()
