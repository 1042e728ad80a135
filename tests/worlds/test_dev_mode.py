"""Python's development mode has nothing to say about either client, whether it is closed or not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.testing import Harness
from worlds.stores import every_store

# The first two snippets of the README; the blocking client is never closed.
BLOCKING = """
import sys
import holdfast

locks = holdfast.connect(sys.argv[1])
with locks.lock("order:42", ttl=30, timeout=20) as lease:
    print(lease.fence)
"""
ASYNCIO = """
import asyncio, sys
import holdfast

async def main():
    asyncio.get_running_loop().slow_callback_duration = 60  # the machine may be busy
    async with holdfast.connect_async(sys.argv[1]) as locks:
        async with locks.lock("order:42") as lease:
            print(lease.fence)

asyncio.run(main())
"""
UNCLOSED = """
import asyncio, sys
import holdfast

async def main():
    asyncio.get_running_loop().slow_callback_duration = 60  # the machine may be busy
    locks = holdfast.connect_async(sys.argv[1])
    async with locks.lock("order:42") as lease:
        print(lease.fence)

asyncio.run(main())
"""
# A wait opens a second connection, for wake-ups.
WAITED = """
import sys, threading, time
import holdfast

locks = holdfast.connect(sys.argv[1])
lock = locks.lock("order:42", ttl=30, timeout=20)

def wait():
    with lock as lease:
        print(lease.fence)

with lock:
    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.3)
waiter.join()
"""


@every_store()
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(BLOCKING, id="blocking"),
        pytest.param(WAITED, id="blocking-waited"),
        pytest.param(ASYNCIO, id="asyncio"),
        pytest.param(UNCLOSED, id="asyncio-unclosed"),
    ],
)
def test_development_mode_says_nothing(harness: Harness, program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program, harness.url],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "order%3A42" in done.stdout
