"""One of several processes that contend for a name: writes each hold's token while it holds.

It goes on until a file says that it is enough."""

from __future__ import annotations

import sys
from pathlib import Path

import holdfast


def main(url: str, path: str, enough: str) -> None:
    with holdfast.connect(url, ttl=10) as locks:
        while not Path(enough).exists():
            with locks.lock("name", timeout=60) as lease, Path(path).open("a") as file:
                file.write(f"{lease.token}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
