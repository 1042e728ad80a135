"""A leader with a standby: one process leads; when it is killed, the other takes over.

python examples/leader.py
"""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import Any

from scene import Pipe, Scene, arguments, processes

from holdfast import Lease, LockLost


def candidate(number: int, scene: Scene, pipes: list[Any]) -> None:
    with scene.connect() as locks:
        election = locks.election("scheduler", note=f"candidate {number}")
        while True:
            try:
                with election.campaign() as lease:
                    lead(lease, pipes[number])
            except LockLost:
                continue  # it was held up for too long: another one may lead by now


def lead(lease: Lease, pipe: Any) -> None:
    while True:
        lease.check(at_least=0.1)  # LockLost ends it before it leads no more
        pipe.send(lease.token)
        time.sleep(0.1)


def hear(pipes: list[Any]) -> tuple[int, int]:
    """Who says that it leads, and its token."""
    ready = wait(pipes, timeout=120)
    assert ready, "nobody leads"
    return pipes.index(ready[0]), pipes[pipes.index(ready[0])].recv()


def main() -> None:
    options = arguments("A leader with a standby.", ttl=5.0).parse_args()
    scene = Scene(options.url, options.ttl)
    ours, theirs = zip(*(Pipe() for _ in range(2)), strict=True)  # who is killed breaks its own
    candidates = processes(2, candidate, scene, list(theirs))
    leader, token = hear(list(ours))
    print(f"candidate {leader} leads, with token {token}")
    with scene.connect() as locks:
        observed = locks.election("scheduler").observe()
        print(f"the store says: {next(filter(None, observed))}")
    candidates[leader].kill()
    candidates[leader].join()
    killed = time.monotonic()
    print(f"candidate {leader} was killed")
    _, later = hear([ours[1 - leader]])
    seconds = time.monotonic() - killed
    print(f"candidate {1 - leader} leads after {seconds:.1f} s, with token {later}")
    candidates[1 - leader].kill()
    candidates[1 - leader].join()
    assert later > token


if __name__ == "__main__":
    main()
