"""Run by ``test_deadlocks`` in a process of its own: holds one name and waits for another.

Its arguments are one JSON list: URL, namespace, client, the name that it holds, the name that it
waits for, its timeout. It says ``held``, waits for a line, and then says as JSON what happened.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import holdfast
from holdfast.core import acquire

vars(acquire).update(LONG_WAIT_SECONDS=0.5, RECHECK_SECONDS=(0.3, 0.6))


class Lines(logging.Handler):
    """Keeps the lines that name a deadlock."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.names: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        about = getattr(record, "holdfast", {})
        if about.get("event") == "deadlock":
            self.names.append(about["names"])


def held() -> None:
    print("held", flush=True)
    sys.stdin.readline()


def blocking(url: str, namespace: str, mine: str, other: str, timeout: float) -> None:
    with holdfast.connect(url, namespace=namespace) as locks, locks.lock(mine):
        held()
        with locks.lock(other, timeout=timeout):
            pass


async def tasks(url: str, namespace: str, mine: str, other: str, timeout: float) -> None:
    async with holdfast.connect_async(url, namespace=namespace) as locks, locks.lock(mine):
        await asyncio.to_thread(held)
        async with locks.lock(other, timeout=timeout):
            pass


def main() -> None:
    url, namespace, flavour, *what = json.loads(sys.argv[1])
    lines = Lines()
    logging.getLogger("holdfast").addHandler(lines)
    told: dict[str, Any] = {"error": "", "deadlock": []}
    try:
        if flavour == "asyncio":
            asyncio.run(tasks(url, namespace, *what))
        else:
            blocking(url, namespace, *what)
    except holdfast.LockTimeout as error:
        told = {"error": str(error), "deadlock": error.deadlock}
    print(json.dumps({**told, "lines": lines.names}), flush=True)


if __name__ == "__main__":
    main()
