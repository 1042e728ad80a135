"""Outages and timeouts of waiters that are behind each other in one client."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any, NoReturn
from uuid import uuid4

import pytest

import holdfast
from holdfast.errors import BackendUnavailable, LockTimeout

WAITERS = 6


async def _refuse(*_: object, **__: object) -> NoReturn:
    raise BackendUnavailable("connection refused")


def _new() -> str:
    return f"memory://{uuid4().hex}"


def test_patience_of_waiters_behind_each_other_does_not_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with holdfast.connect(_new(), patience=2) as locks:
        monkeypatch.setattr(locks._engine.backend, "attempt", _refuse)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                locks.lock("name").acquire()
            except BackendUnavailable as error:
                errors.append(error)

        threads = [threading.Thread(target=wait, daemon=True) for _ in range(WAITERS)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAITERS + 10)
        assert len(errors) == WAITERS
        assert time.monotonic() - began < 6
        assert locks._engine.local_queues.outages == {}


def test_patience_of_tasks_counts_from_their_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[float]:
        async with holdfast.connect_async(_new(), patience=3) as locks:
            monkeypatch.setattr(locks._engine.backend, "attempt", _refuse)

            async def wait(after: float) -> float:
                await asyncio.sleep(after)
                began = time.monotonic()
                with pytest.raises(BackendUnavailable, match="connection refused"):
                    await locks.lock("name").acquire()
                return time.monotonic() - began

            return await asyncio.gather(*[wait(after) for after in (0.0, 1.0, 2.0)])

    for took in asyncio.run(main()):
        assert 1.0 <= took < 5.0  # not 6 and 9


def test_an_outage_that_is_over_takes_no_patience_from_waiters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The waiter behind the first goes on waiting once attempts are answered again."""

    async def main() -> None:
        url = _new()
        async with (
            holdfast.connect_async(url, patience=1.5) as locks,
            holdfast.connect_async(url) as other,
        ):
            held = await other.lock("name").acquire()
            assert held
            with monkeypatch.context() as patch:
                patch.setattr(locks._engine.backend, "attempt", _refuse)
                waits = [asyncio.create_task(locks.lock("name").acquire()) for _ in range(2)]
                await asyncio.sleep(0.2)
            await asyncio.sleep(3)
            assert not any(wait.done() for wait in waits)
            await held.release()
            first = await asyncio.wait_for(waits[0], 10)
            assert first
            await first.release()
            second = await asyncio.wait_for(waits[1], 10)
            assert second
            await second.release()

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [3.0, None])
def test_attempts_go_on_until_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    """Also if the next pause would end after it: the server may come back in that pause."""
    sent: list[float] = []

    async def refuse(*_: object, **__: object) -> NoReturn:
        sent.append(time.monotonic())
        raise BackendUnavailable("connection refused")

    with holdfast.connect(_new(), timeout=timeout, patience=3.0) as locks:
        monkeypatch.setattr(locks._engine.backend, "attempt", refuse)
        # Every pause is the longest one that the jitter allows.
        monkeypatch.setattr(locks._engine.runtime, "between", lambda _low, high: high)
        began = time.monotonic()
        with pytest.raises(BackendUnavailable, match="connection refused"):
            locks.lock("name").acquire()
    assert sent[-1] - began >= 2.5
    assert len(sent) < 20


@pytest.mark.parametrize("slow", [0.0, 1.0], ids=["fast", "slow"])
@pytest.mark.parametrize("timeout", [0.0, 0.1])
def test_a_short_timeout_gives_the_first_request_most_of_a_second(
    monkeypatch: pytest.MonkeyPatch, timeout: float, slow: float
) -> None:
    """Enough on a busy machine, and no more on a store that hangs; ``timeout=0``, which is one
    request, has longer on a store whose answers took longer before."""
    with holdfast.connect(_new()) as locks:
        engine, seconds = locks._engine, []
        attempt = engine.backend.attempt

        async def attempted(*args: Any, until: float, **more: Any) -> Any:
            seconds.append(until - engine.runtime.now())
            return await attempt(*args, until=until, **more)

        monkeypatch.setattr(engine.backend, "attempt", attempted)
        engine.renewer.answered(engine.runtime.now() - slow)
        with locks.lock("name", timeout=timeout):
            pass
    expected = 3 * slow if slow and not timeout else 0.9
    assert expected - 0.3 < seconds[0] <= expected + 0.01


@pytest.mark.parametrize("timeout", [0.0, 0.1])
def test_a_store_that_hangs_delays_acquire_and_close_by_a_second_in_all(
    monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    """By the deadlines that both give their requests, so that a busy machine does not matter."""
    with holdfast.connect(_new()) as locks:
        engine, seconds = locks._engine, []

        async def hang(*_: object, until: float, **__: object) -> NoReturn:
            seconds.append(until - engine.runtime.now())
            time.sleep(max(0.0, seconds[-1]))
            raise BackendUnavailable("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(engine.backend, "attempt", hang)
            patch.setattr(engine.renewer.backend, "abandon", _refuse)
            with pytest.raises(BackendUnavailable, match="no answer"):
                locks.lock("name", timeout=timeout).acquire()
            # The asyncio client gives half as much again to what still runs on its loop.
            closing = 1.5 * engine.renewer.close_seconds()
    assert seconds[0] + closing <= 1.0


def test_the_error_has_the_true_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(*_: object, **__: object) -> NoReturn:
        time.sleep(1.2)
        raise BackendUnavailable("no answer")

    with holdfast.connect(_new(), timeout=1) as locks:
        monkeypatch.setattr(locks._engine.backend, "attempt", slow)
        with pytest.raises(BackendUnavailable) as caught:
            locks.lock("name").acquire()
    found = re.fullmatch(
        r"gave up on 'name' after 1 try in (\d\.\d) s: no answer", str(caught.value)
    )
    assert found, caught.value
    assert 1.2 <= float(found[1]) < 5


def test_a_timeout_behind_others_of_the_process_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the store can't name a holder. It names the holder if it can."""

    async def main(timeout: float) -> str:
        async with holdfast.connect_async(url) as locks:
            if fail:
                monkeypatch.setattr(locks._engine.backend, "look", _refuse)
            ahead = [asyncio.create_task(locks.lock("name").acquire()) for _ in range(2)]
            await asyncio.sleep(0.1)
            with pytest.raises(LockTimeout) as caught:
                async with locks.lock("name", timeout=timeout):
                    pass
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)
            return str(caught.value)

    url = _new()
    with holdfast.connect(url) as holder, holder.lock("name", note="its note"):
        for fail in (False, True):
            text = asyncio.run(main(0.30000001))
            assert "was not acquired within 0.3 s: " in text
            assert ("2 waiters of this process were ahead of it" in text) is fail
            assert ("its note" in text) is not fail


def test_a_timeout_behind_others_is_told_in_time_if_the_store_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang(*_: object, **__: object) -> None:
        time.sleep(8)

    url = _new()
    with holdfast.connect(url) as holder, holder.lock("name"), holdfast.connect(url) as locks:
        monkeypatch.setattr(locks._engine.backend, "look", hang)
        first = threading.Thread(target=lambda: locks.lock("name", timeout=3).acquire())
        first.start()
        time.sleep(0.1)
        began = time.monotonic()
        late = pytest.raises(LockTimeout, match="1 waiter of this process was ahead of it")
        with late, locks.lock("name", timeout=0.5):
            pass
        assert time.monotonic() - began < 4
        first.join()


def test_patience_of_a_waiter_does_not_wait_for_the_timeout_of_the_one_in_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> float:
        async with holdfast.connect_async(_new(), patience=1) as locks:
            monkeypatch.setattr(locks._engine.backend, "attempt", _refuse)
            first = asyncio.create_task(locks.lock("name", timeout=60).acquire())
            await asyncio.sleep(0.1)
            began = time.monotonic()
            with pytest.raises(BackendUnavailable, match="connection refused"):
                await locks.lock("name").acquire()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            return time.monotonic() - began

    assert 0.9 <= asyncio.run(main()) < 10


def test_an_outage_that_ends_with_the_patience_is_no_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A waiter without a timeout never gets ``LockTimeout``, whatever happens between two lines."""

    async def main() -> None:
        async with holdfast.connect_async(_new(), patience=0.5) as locks:
            queues = locks._engine.local_queues
            held = await locks.lock("name").acquire()
            assert held
            first = asyncio.create_task(locks.lock("name").acquire())
            await asyncio.sleep(0.1)
            second = asyncio.create_task(locks.lock("name").acquire())
            await asyncio.sleep(0.1)
            queues.unreachable("name", time.monotonic(), BackendUnavailable("gone"))
            monkeypatch.setattr("holdfast.core.acquire._Outage.check_local", lambda _: None)
            await asyncio.sleep(1.0)
            queues.reachable("name")
            await held.release()
            for wait in (first, second):
                lease = await asyncio.wait_for(wait, 20)
                assert lease
                await lease.release()

    asyncio.run(main())


def test_an_old_outage_ends_with_the_first_answer() -> None:
    """Also if that answer is that the name is busy: nobody behind it gives up."""

    async def main() -> None:
        url = _new()
        async with holdfast.connect_async(url) as locks, holdfast.connect_async(url) as other:
            held = await other.lock("name").acquire()
            assert held
            queues = locks._engine.local_queues
            queues.unreachable("name", 0.0, BackendUnavailable("long ago"))
            wait = asyncio.create_task(locks.lock("name").acquire())
            await asyncio.sleep(0.1)
            assert queues.outages == {}
            await held.release()
            lease = await asyncio.wait_for(wait, 20)
            assert lease
            await lease.release()

    asyncio.run(main())


def test_a_timeout_has_a_text_if_the_store_answers_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = _new()
    with holdfast.connect(url) as holder, holder.lock("name"), holdfast.connect(url) as locks:
        monkeypatch.setattr(locks._engine.backend, "abandon", _refuse)
        late = pytest.raises(LockTimeout, match=r"'name' on memory.* not acquired within 0\.3 s")
        with late, locks.lock("name", timeout=0.3):
            pass
        assert locks.lock("name").acquire(timeout=0.3) is None
