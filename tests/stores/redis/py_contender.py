"""Old code: takes and gives back one of redis-py's own locks, and notes when it held it.

It goes on until a file says that it is enough."""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from pathlib import Path

import redis
from redis.lock import Lock

from holdfast.testing.history import Recorder

TTL_SECONDS = 30.0
SLEEP_SECONDS = 0.005
"""Old code has no place in line: who comes seldom hardly finds a busy name free."""
PAUSE_SECONDS = 0.03
"""Nor has it any manners: who comes again at once leaves nothing to the others."""


def main(url: str, name: str, history: str, enough: str) -> None:
    recorder = Recorder(Path(history), f"redis-py {os.getpid()}")
    with redis.Redis.from_url(url) as client:
        lock = Lock(client, name, timeout=TTL_SECONDS, sleep=SLEEP_SECONDS)
        for attempt in count():
            if Path(enough).exists():
                return
            recorder.asked(str(attempt), name)
            with lock:
                # It has no tokens: the server's time stands for one, as Holdfast counts in it.
                seconds, micros = client.time()
                recorder.held(str(attempt), seconds * 1_000_000 + micros, TTL_SECONDS)
                time.sleep(0.001)
                recorder.ended(str(attempt))
            time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
