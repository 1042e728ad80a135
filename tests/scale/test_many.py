"""Many waiters and many holds in one process: few requests, one thread, in order."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from servers.process import wait_until


def _count(backend: Any, calls: Counter[str]) -> None:
    """Counts the calls of a backend; each is one transaction or round trip."""

    def counted(word: str) -> Callable[..., Any]:
        inner = getattr(backend, word)

        async def call(*args: Any, **kwargs: Any) -> Any:
            calls[word] += 1
            return await inner(*args, **kwargs)

        return call

    for word in ("attempt", "exchange", "release", "renew", "abandon", "look"):
        setattr(backend, word, counted(word))


def _url(tmp_path: Path, store: str) -> str:
    return "memory://many" if store == "memory" else f"sqlite://{tmp_path}/locks.db"


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_thousand_tasks_are_served_in_order(tmp_path: Path, store: str) -> None:
    """Only the first of them is ever in the store's queue: two transactions per hold."""
    calls: Counter[str] = Counter()
    served: list[int] = []

    async def main() -> None:
        async with holdfast.connect_async(_url(tmp_path, store)) as locks:
            _count(locks._engine.backend, calls)
            lock = locks.lock("name")

            async def use(number: int) -> None:
                async with lock:
                    served.append(number)

            await asyncio.gather(*(use(number) for number in range(1000)))

    asyncio.run(main())
    assert served == list(range(1000))
    assert calls.total() <= 2200, calls


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_thousand_holds_are_kept_by_one_thread(tmp_path: Path, store: str) -> None:
    """One renewer, and one batch per interval for all of them."""
    before = set(threading.enumerate())
    with holdfast.connect(_url(tmp_path, store), ttl=30) as locks:
        sizes: list[int] = []
        renewed = threading.Event()
        renewer = locks._renewer_thread.renewer
        renew = renewer.backend.renew

        async def counted(grants: Any, waits: Any, *, until: float, shorten: bool = False) -> Any:
            sizes.append(len(grants))
            answer = await renew(grants, waits, until=until, shorten=shorten)
            renewed.set()
            return answer

        leases = [locks.lock(f"name:{number}").acquire() for number in range(1000)]
        names = [thread.name for thread in set(threading.enumerate()) - before]
        assert sorted({*names, "holdfast-watcher"}) == ["holdfast-renewer", "holdfast-watcher"]
        assert names.count("holdfast-renewer") == 1
        renewer.backend.renew = counted  # type: ignore[method-assign]
        for hold in renewer.holds.values():
            hold.renew_at = 0.0  # as if a third of the ttl had passed
        renewer.plan(0.0)
        assert renewed.wait(10)
        wait_until("all are renewed", lambda: sum(sizes) >= 1000)
        assert sum(sizes) == 1000
        assert len(sizes) <= 2  # two if the renewer began while the loop above was under way
        for lease in leases:
            assert lease is not None
            assert lease.release()


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_an_uncontended_hold_is_two_requests(tmp_path: Path, store: str) -> None:
    """One acquires and one releases."""
    calls: Counter[str] = Counter()
    with holdfast.connect(_url(tmp_path, store)) as locks:
        with locks.lock("name"):
            pass
        _count(locks._engine.backend, calls)
        with locks.lock("name"):
            pass
    assert calls == {"attempt": 1, "release": 1}
