"""Readers and writers of one file: readers together, writers alone, and stale ones refused.

A writer moves money between two accounts in a file; a reader adds them up. The sum never changes.

    python examples/shared_file.py
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from scene import Queue, Scene, arguments, processes

from holdfast import fencing

TRANSFERS = 10
TOTAL = 100


def writer(number: int, scene: Scene, path: str, told: Any) -> None:
    draw = random.Random(number)
    with scene.connect() as locks:
        for _ in range(TRANSFERS):
            lock = locks.rwlock("accounts").write()
            with lock as lease, fencing.file.guard(path, lease) as file:
                accounts = json.loads(file.read_text())
                amount = draw.randrange(1, 10)
                accounts["a"] -= amount
                accounts["b"] += amount
                accounts["transfers"] += 1
                file.write_text(json.dumps(accounts))
    told.put(None)


def reader(_: int, scene: Scene, path: str, told: Any) -> None:
    with scene.connect() as locks:
        for _ in range(TRANSFERS):
            lock = locks.rwlock("accounts").read()
            with lock as lease, fencing.file.guard(path, lease) as file:
                accounts = json.loads(file.read_text())
            told.put(accounts["a"] + accounts["b"])
    told.put(None)


def main() -> None:
    options = arguments("Readers and writers of one file.").parse_args()
    scene, told = Scene(options.url, options.ttl, "SHARED"), Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "accounts.json"
        path.write_text(json.dumps({"a": TOTAL, "b": 0, "transfers": 0}))
        everybody = processes(2, writer, scene, str(path), told)
        everybody += processes(3, reader, scene, str(path), told)
        sums: list[int] = []
        left = len(everybody)
        while left:
            entry = told.get(timeout=120)
            left -= entry is None
            if entry is not None:
                sums.append(entry)
        for process in everybody:
            process.join()
        accounts = json.loads(path.read_text())
    print(f"{accounts['transfers']} transfers, {len(sums)} sums, all of them {set(sums)}")
    assert set(sums) == {TOTAL}
    assert accounts["transfers"] == 2 * TRANSFERS


if __name__ == "__main__":
    main()
