"""A process that contends for a name in a loop and appends the token of each hold to a file.

The loop ends when the file ``enough`` exists."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from holdfast.testing import Flavour
from holdfast.testing.clients import open_client, run_here


async def main(url: str, path: str, enough: str, flavour: str) -> None:
    async with open_client(url, Flavour(flavour), run_here, ttl=10) as client:
        while not _exists(enough):
            async with client.lock("name", timeout=60) as lease:
                _write(path, lease.token)


def _exists(path: str) -> bool:
    return Path(path).exists()


def _write(path: str, token: int) -> None:
    with Path(path).open("a") as file:
        file.write(f"{token}\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
