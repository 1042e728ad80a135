"""A single flight: eight processes miss the same cache entry, one of them computes it.

The others wait for its result instead of doing the work again; who comes later finds it recorded.

    python examples/cache_refill.py
"""

from __future__ import annotations

import time
from typing import Any

from scene import Queue, Scene, arguments, processes

PROCESSES = 8


def page(number: int, scene: Scene, told: Any) -> None:
    def compute() -> dict[str, int]:
        time.sleep(0.5)  # the expensive part
        return {"apples": 3, "pears": 5}

    with scene.connect() as locks:
        outcome = locks.once("price-list", keep=3600).run(compute)
        told.put((number, outcome.ran, outcome.value))


def main() -> None:
    options = arguments("Single-flight refill of a cache.").parse_args()
    scene, told = Scene(options.url, options.ttl, "RECORDS"), Queue()
    pages = processes(PROCESSES, page, scene, told)
    answers = [told.get(timeout=120) for _ in pages]
    for process in pages:
        process.join()
    computed = [number for number, ran, _ in answers if ran]
    print(f"process {computed} computed the prices; {len(answers)} processes have them:", end=" ")
    print(answers[0][2])
    assert len(computed) == 1
    assert all(value == {"apples": 3, "pears": 5} for _, _, value in answers)


if __name__ == "__main__":
    main()
