"""A client that is opened in a thread leaves no import of its store to the event loop."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, importlib.abc, sys, threading
import holdfast.locks_async

on_the_loop = []

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is threading.main_thread():
            on_the_loop.append(name)

async def main(url):
    sys.meta_path.insert(0, Watch())
    if sys.argv[2] == "thread":
        client = await asyncio.to_thread(holdfast.connect_async, url)
    else:
        client = holdfast.connect_async(url)
    client.lock("order:42")
    print(*on_the_loop)

asyncio.run(main(sys.argv[1]))
"""
STORES = {
    "hiredis": "redis://127.0.0.1:1/0",
    "psycopg": "postgresql://127.0.0.1:1/x",
    "pymysql": "mysql://user@127.0.0.1:1/x",
    "puresasl": "zookeeper://user:password@127.0.0.1:1/x?auth=sasl",
}


def imported_on_the_loop(url: str, where: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, where], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("library", STORES)
def test_a_client_that_is_opened_in_a_thread(library: str) -> None:
    found = imported_on_the_loop(STORES[library], "thread")
    assert library not in found
    assert "holdfast" not in found


def test_a_client_that_is_opened_on_the_loop() -> None:
    """The test above would see it."""
    assert "hiredis" in imported_on_the_loop(STORES["hiredis"], "loop")
