"""A nightly job on three hosts: it runs once per night, whichever host comes first.

A night lasts a second here; a real one is ``locks.every(24 * 3600, name, offset=2 * 3600)``. What
is recorded is the night that was run, so it makes no difference whose clock is ahead or behind.

    python examples/nightly_job.py
"""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from scene import Queue, Scene, arguments, processes

HOSTS = 3
NIGHT = 1.0
NIGHTS = 3


def host(number: int, scene: Scene, started: float, told: Any) -> None:
    def report(due: datetime) -> str:
        told.put((number, due.timestamp()))
        return f"report of {due:%H:%M:%S}"

    with scene.connect() as locks:
        nightly = locks.every(NIGHT, "nightly-report")
        while time.time() < started + NIGHT * NIGHTS:
            outcome = nightly.run(report)
            time.sleep(outcome.next_seconds or 0)
    told.put(None)


def main() -> None:
    options = arguments("A nightly job on three hosts.").parse_args()
    scene, told = Scene(options.url, options.ttl), Queue()
    hosts = processes(HOSTS, host, scene, time.time(), told)
    runs: list[tuple[int, float]] = []
    left = len(hosts)
    while left:
        entry = told.get(timeout=120)
        left -= entry is None
        if entry is not None:
            number, due = entry
            print(
                f"the night of {datetime.fromtimestamp(due, UTC):%H:%M:%S} was run by host {number}"
            )
            runs.append(entry)
    for process in hosts:
        process.join()
    nights = Counter(due for _, due in runs)
    print(f"{len(nights)} nights, {len(runs)} runs")
    assert len(nights) >= NIGHTS - 1
    assert set(nights.values()) == {1}


if __name__ == "__main__":
    main()
