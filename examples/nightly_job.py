"""A nightly job on three hosts: it runs once per night, whichever host comes first.

A night lasts a second here; a real one is ``locks.every(24 * 3600, name, offset=2 * 3600)``. What
is recorded is the night that was run, so it makes no difference whose clock is ahead or behind.

    python examples/nightly_job.py
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any

from scene import Event, Queue, Scene, arguments, processes

HOSTS = 3
NIGHT = 1.0
NIGHTS = 3


def host(number: int, scene: Scene, morning: Any, told: Any) -> None:
    def report(due: datetime) -> str:
        told.put((number, due))
        return f"report of {due:%H:%M:%S}"

    with scene.connect() as locks:
        nightly = locks.every(NIGHT, "nightly-report")
        while not morning.is_set():
            outcome = nightly.run(report)
            if not outcome.ran:
                told.put((number, None))  # it has been run, or is being run
            morning.wait(outcome.next_seconds or 0)
    told.put(None)


def follow(told: Any, morning: Any) -> tuple[Counter[datetime], Counter[int]]:
    """How often each night was run, and how often each host came to run one.

    The story ends when every host has come for that many nights, however long that takes.
    """
    nights: Counter[datetime] = Counter()
    came: Counter[int] = Counter()
    left = HOSTS
    while left:
        entry = told.get(timeout=120)
        if entry is None:
            left -= 1
            continue
        number, due = entry
        came[number] += 1
        if due is not None:
            print(f"the night of {due:%H:%M:%S} was run by host {number}")
            nights[due] += 1
        if all(came[number] >= NIGHTS for number in range(HOSTS)):
            morning.set()
    return nights, came


def main() -> None:
    options = arguments("A nightly job on three hosts.").parse_args()
    scene = Scene(options.url, options.ttl, "RECORDS")
    told, morning = Queue(), Event()
    hosts = processes(HOSTS, host, scene, morning, told)
    nights, came = follow(told, morning)
    for process in hosts:
        process.join()
    print(f"{HOSTS} hosts came {came.total()} times; {len(nights)} nights, ", end="")
    print("each was run once" if set(nights.values()) == {1} else f"runs: {dict(nights)}")
    assert set(nights.values()) == {1}


if __name__ == "__main__":
    main()
