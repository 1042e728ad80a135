"""One ``Lock`` object, many threads, leases that expire in between."""

from __future__ import annotations

import threading
import time
import warnings

import pytest

import holdfast
from holdfast.core.engine import Engine
from holdfast.core.hold import MOST_DEAD_HANDLES, Hold
from holdfast.errors import LockLost


def test_a_thread_never_releases_the_hold_of_another() -> None:
    """Sixteen threads share one object; every third exceeds its ttl on purpose."""
    locks = holdfast.connect("memory://sharing", ttl=0.15)
    lock = locks.lock("name", renew=False)
    inside: set[int] = set()
    troubles: list[str] = []
    lost = threading.Semaphore(0)

    def use(number: int) -> None:
        for turn in range(4):
            try:
                with lock as lease:
                    if (number + turn) % 3 == 0:
                        time.sleep(0.25)  # past its ttl: the next one is in by now
                        continue
                    inside.add(number)
                    if inside != {number} and lease.held:
                        troubles.append(f"{number} shares the lock with {inside - {number}}")
                    inside.discard(number)
                    if not lease.held:
                        troubles.append(f"{number} lost a hold that it had just taken")
            except LockLost:
                lost.release()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(16)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not troubles
    assert lost.acquire(blocking=False)
    assert not lock.locked()
    locks.close()


def test_a_hold_that_is_re_entered_as_another_thread_releases_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends with the newest handle, and no other client acquires before."""
    with holdfast.connect("memory://re-entered", ttl=3600) as locks:
        lock = locks.lock("name", reentrant=True)
        outer = lock.acquire()
        assert outer is not None
        released: list[bool | None] = []
        releasing = threading.Thread(target=lambda: released.append(outer.release()))
        at_the_client, go_on = threading.Event(), threading.Event()
        release, tidy = Engine.release, Hold.drop_dead_handles

        async def late(client: Engine, hold: Hold) -> bool | None:
            at_the_client.set()
            assert go_on.wait(60)
            return await release(client, hold)

        def switch(hold: Hold) -> None:
            """As if the other thread ran between the check of the hold and the new handle."""
            monkeypatch.setattr(Engine, "release", late)
            releasing.start()
            assert at_the_client.wait(60)
            monkeypatch.setattr(Engine, "release", release)
            tidy(hold)

        monkeypatch.setattr(Hold, "drop_dead_handles", switch)
        with lock as inner:
            go_on.set()
            releasing.join()
            assert released == [True]
            assert inner.held
            assert [holder.token for holder in locks.inspect("name").holders] == [inner.token]
        assert not locks.inspect("name").holders


def test_the_last_handle_ends_a_hold_that_was_re_entered_often() -> None:
    """Also if dead handles were removed in between."""
    with holdfast.connect("memory://nested", ttl=3600) as locks:
        lock = locks.lock("name", reentrant=True)
        first = lock.acquire()
        assert first is not None
        for _ in range(2 * MOST_DEAD_HANDLES):
            with lock:
                pass
        assert first.held
        assert first.release() is True
        assert not locks.inspect("name").holders


def test_a_hold_that_is_just_being_lost_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is removed first and marked lost later: a release in between returns that it was not
    held."""
    said: list[bool | None] = []
    with holdfast.connect("memory://just-lost") as locks:
        lease = locks.lock("name").acquire()
        assert lease is not None
        renewer, release = locks._engine.renewer, lease.release
        remove = renewer.remove

        def remove_and_wait(hold: Hold) -> bool:
            removed = remove(hold)
            if removed:
                said.append(release())
            return removed

        monkeypatch.setattr(renewer, "remove", remove_and_wait)
        assert renewer.lose(lease._hold, "somebody broke it")
    assert said == [False]
