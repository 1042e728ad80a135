"""A program: alarms raise in its main thread, while other threads use the same pool.

A program of its own, because an interrupt may come at any moment: in a test it would also hit the
code of pytest that runs when an unclosed socket is collected.
"""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hazards.drivers import LinesEndpoint, echo
from holdfast.io.blocking import BlockingPool
from holdfast.io.clock import now
from stores.fake_server import fake_server

SOON = 30.0
INTERRUPTED_SECONDS = 3.0
REQUESTS = 200
THREADS = 3


class Asker:
    """Asks again and again, and notes each reply that is not its own."""

    def __init__(self, pool: BlockingPool, name: str) -> None:
        self._pool, self._name, self._count = pool, name, 0
        self.wrong: list[Any] = []
        self.stop = threading.Event()

    def ask(self) -> None:
        self._count += 1
        text = f"{self._name}-{self._count}".encode()
        reply = self._pool.request(text + b"\n")
        if reply != text:
            self.wrong.append((text, reply))

    def run(self) -> None:
        while not self.stop.is_set():
            self.ask()


def interrupt(work: Callable[[], None], seconds: float) -> int:
    """Runs the work again and again, and interrupts it at random moments; returns how often.

    An interrupt that comes inside a destructor is swallowed there. So the work is bounded, and each
    alarm is set anew.
    """

    def alarm(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, alarm)
    runs = ends = 0
    until = now() + seconds
    while now() < until:
        runs += 1
        with suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00005, 0.001))
            for _ in range(REQUESTS):
                work()
            signal.setitimer(signal.ITIMER_REAL, 0)
            ends += 1
    return runs - ends


def main() -> None:
    sys.unraisablehook = lambda _: None  # interrupts in destructors, and sockets left to them
    with fake_server(echo) as port:
        pool = BlockingPool(LinesEndpoint(port), THREADS)
        first, *others = askers = [Asker(pool, f"asker-{n}") for n in range(THREADS)]
        threads = [threading.Thread(target=other.run, daemon=True) for other in others]
        for thread in threads:
            thread.start()
        interrupts = interrupt(first.ask, INTERRUPTED_SECONDS)
        for other, thread in zip(others, threads, strict=True):
            other.stop.set()
            thread.join(SOON)
        print("interrupts", interrupts)
        print("stuck threads", sum(thread.is_alive() for thread in threads))
        print("wrong replies", [wrong for asker in askers for wrong in asker.wrong])
        gc.collect()
        free = [pool.take(now() + SOON) for _ in range(THREADS)]
        print("free connections", len(free))
        for connection in free:
            pool.drop(connection)
        pool.close()


if __name__ == "__main__":
    main()
