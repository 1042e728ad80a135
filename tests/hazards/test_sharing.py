"""One ``Lock`` object, many threads, leases that expire in between."""

from __future__ import annotations

import threading
import time
import warnings

import holdfast
from holdfast.errors import LockLost


def test_nobody_releases_somebody_elses_hold() -> None:
    """Sixteen threads share one object; every third overstays its ttl on purpose."""
    locks = holdfast.connect("memory://sharing", ttl=0.15)
    lock = locks.lock("name", renew=False)
    inside: set[int] = set()
    troubles: list[str] = []
    lost = threading.Semaphore(0)

    def use(number: int) -> None:
        for turn in range(4):
            try:
                with lock as lease:
                    if (number + turn) % 3 == 0:
                        time.sleep(0.25)  # past its ttl: the next one is in by now
                        continue
                    inside.add(number)
                    if inside != {number} and lease.held:
                        troubles.append(f"{number} shares the lock with {inside - {number}}")
                    inside.discard(number)
                    if not lease.held:
                        troubles.append(f"{number} lost a hold that it had just taken")
            except LockLost:
                lost.release()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(16)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not troubles
    assert lost.acquire(blocking=False)
    assert not lock.locked()
    locks.close()
