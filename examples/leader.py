"""A leader with a standby: one process leads; when it is killed, the other takes over.

python examples/leader.py
"""

from __future__ import annotations

import time
from typing import Any

from scene import Queue, Scene, arguments, processes


def candidate(number: int, scene: Scene, told: Any) -> None:
    with scene.connect() as locks:
        election = locks.election("scheduler", note=f"candidate {number}")
        with election.campaign() as lease:
            while True:
                lease.check(at_least=0.1)  # LockLost ends it before it leads no more
                told.put((number, lease.token))
                time.sleep(0.1)


def main() -> None:
    options = arguments("A leader with a standby.").parse_args()
    scene, told = Scene(options.url, options.ttl), Queue()
    candidates = processes(2, candidate, scene, told)
    leader, token = told.get(timeout=60)
    print(f"candidate {leader} leads, with token {token}")
    with scene.connect() as locks:
        holder = locks.election("scheduler").leader()
        assert holder is not None
        print(f"the store says: {holder}")
    candidates[leader].kill()
    candidates[leader].join()
    killed = time.monotonic()
    print(f"candidate {leader} was killed")
    while (entry := told.get(timeout=60))[0] == leader:
        pass
    follower, later = entry
    print(f"candidate {follower} leads after {time.monotonic() - killed:.1f} s, with token {later}")
    candidates[follower].kill()
    candidates[follower].join()
    assert follower != leader
    assert later > token


if __name__ == "__main__":
    main()
