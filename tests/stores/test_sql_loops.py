"""An asyncio client of PostgreSQL, MySQL or SQLite is used on one event loop after another."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

import holdfast
from stores import sql_helpers
from stores.sql_helpers import MODES, Store

store = sql_helpers.store
LOOPS = 10


def open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def use_on_many_loops(url: str, namespace: str) -> None:
    """Uses a client on a new loop each time, with waits, and closes it on the last one."""
    locks = holdfast.connect_async(url, namespace=namespace)

    async def use() -> None:
        async with locks.lock("name"):
            pass

    async def wait() -> None:
        """The client waits, so that it subscribes."""
        other = holdfast.connect_async(url, namespace=namespace)
        async with other, other.lock("name"):
            assert await locks.lock("name").acquire(timeout=0.3) is None

    before = open_files()
    asyncio.run(use())
    asyncio.run(wait())
    first = open_files()
    for _ in range(LOOPS):
        asyncio.run(use())
    asyncio.run(wait())
    assert open_files() <= first + LOOPS // 2
    asyncio.run(locks.close())
    assert open_files() <= before + LOOPS // 2


@pytest.mark.parametrize("mode", MODES)
def test_loops_leave_no_descriptors_behind(store: Store, namespace: str, mode: str) -> None:
    use_on_many_loops(store.url(mode), namespace)


def test_loops_leave_no_descriptors_of_the_embedded_store(tmp_path: Path, namespace: str) -> None:
    use_on_many_loops(f"sqlite://{tmp_path}/locks.db", namespace)
