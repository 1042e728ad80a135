"""A single flight: eight processes miss the same cache entry, one of them computes it.

The others wait for its result instead of doing the work again. When the entry is stale, one process
computes a new one, and the others go on with the old one at once.

    python examples/cache_refill.py
"""

from __future__ import annotations

import time
from typing import Any

from scene import Event, Queue, Scene, arguments, processes

PROCESSES = 8
FRESH_SECONDS = 5.0
STALE_SECONDS = 3600.0


class Steps:
    """What the processes of this example wait for."""

    def __init__(self) -> None:
        self.start, self.stale, self.refilling, self.answered = Event(), Event(), Event(), Event()


def page(number: int, scene: Scene, told: Any, steps: Steps) -> None:
    """A web process that needs the prices: first while there are none, then when they are stale."""

    def compute() -> dict[str, int]:
        time.sleep(0.5)  # the expensive part
        return {"apples": 3, "pears": 5}

    def compute_again() -> dict[str, int]:
        steps.refilling.set()
        steps.answered.wait(60)  # so expensive that all others have their answer before it ends
        return {"apples": 4, "pears": 5}

    with scene.connect() as locks:
        prices = locks.once("price-list", keep=FRESH_SECONDS, stale_for=STALE_SECONDS)
        told.put(number)
        steps.start.wait()
        told.put((number, prices.run(compute)))
        steps.stale.wait()
        if number > 0:
            steps.refilling.wait()  # process 0 comes first, and computes
        told.put((number, prices.run(compute_again)))


def main() -> None:
    options = arguments("Single-flight refill of a cache.").parse_args()
    scene, told, steps = Scene(options.url, options.ttl, "RECORDS"), Queue(), Steps()
    pages = processes(PROCESSES, page, scene, told, steps)
    for _ in pages:
        told.get(timeout=120)
    steps.start.set()
    missed = dict(told.get(timeout=120) for _ in pages)
    computed = [number for number, outcome in missed.items() if outcome.ran]
    print(f"process {computed} computed the prices; {len(missed)} processes have them:", end=" ")
    print(missed[0].value)
    assert len(computed) == 1
    assert all(outcome.value == {"apples": 3, "pears": 5} for outcome in missed.values())

    time.sleep(FRESH_SECONDS)
    steps.stale.set()
    old = dict(told.get(timeout=120) for _ in pages[1:])
    steps.answered.set()
    number, new = told.get(timeout=120)
    print(f"then they were stale: process [{number}] computed them again, and", end=" ")
    print(f"{len(old)} went on with the old ones")
    assert all(outcome.stale and outcome.value["apples"] == 3 for outcome in old.values())
    assert new.ran
    assert new.value["apples"] == 4
    for process in pages:
        process.join()


if __name__ == "__main__":
    main()
