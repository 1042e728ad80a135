"""One of several processes that contend for a name: writes each hold's token while it holds."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import holdfast


def main(url: str, path: str, seconds: str) -> None:
    ends = time.monotonic() + float(seconds)
    with holdfast.connect(url, ttl=10) as locks:
        while time.monotonic() < ends:
            with locks.lock("name", timeout=30) as lease, Path(path).open("a") as file:
                file.write(f"{lease.token}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
