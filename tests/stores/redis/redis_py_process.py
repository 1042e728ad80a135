"""A process that uses redis-py's own Lock: acquires and releases it, and records its holds.

It ends when the file ``enough`` exists."""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from pathlib import Path

import redis
from redis.lock import Lock

from holdfast.io.clock import now
from holdfast.testing.history import Recorder

TTL_SECONDS = 30.0
SLEEP_SECONDS = 0.005
"""redis-py's Lock has no queue: with a long polling interval it rarely finds a busy name free."""
PAUSE_SECONDS = 0.03
"""Without this pause, the process would acquire again at once and starve the others."""


def main(url: str, name: str, history: str, enough: str) -> None:
    recorder = Recorder(Path(history), f"redis-py {os.getpid()}")
    with redis.Redis.from_url(url) as client:
        lock = Lock(client, name, timeout=TTL_SECONDS, sleep=SLEEP_SECONDS)
        for attempt in count():
            if Path(enough).exists():
                return
            recorder.asked(str(attempt), name)
            with lock:
                # redis-py's Lock has no tokens: the server's time serves as one.
                seconds, micros = client.time()
                token = seconds * 1_000_000 + micros
                recorder.held(str(attempt), token, now() + TTL_SECONDS)
                time.sleep(0.001)
                recorder.ended(str(attempt))
            time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
