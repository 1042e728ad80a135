"""Any reply of a take-over or a hand-over may be lost, where these are several requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from holdfast.claim import Mode
from holdfast.errors import BackendUnavailable
from holdfast.testing import Flavour, Harness
from holdfast.testing.contract import Bench

REQUESTS = {"etcd": "calls.call", "consul": "agent.txn", "zookeeper": "request"}
"""By store: the method of its backend through which all requests go that are lost here."""
MOST = 8


@contextmanager
def losing(backend: Any, word: str, number: int) -> Iterator[list[int]]:
    """Loses the reply to the request of that number. Gives a list that is not empty then."""
    *path, method = word.split(".")
    for part in path:
        backend = getattr(backend, part)
    send: Callable[..., Awaitable[Any]] = getattr(backend, method)
    sent: list[int] = []
    lost: list[int] = []

    async def unanswered(*args: Any, **kwargs: Any) -> Any:
        answer = await send(*args, **kwargs)
        sent.append(number)
        if len(sent) == number:
            lost.append(number)
            raise BackendUnavailable("its reply was lost")
        return answer

    setattr(backend, method, unanswered)
    try:
        yield lost
    finally:
        setattr(backend, method, send)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_take_over_is_repeated_after_any_lost_reply(
    harness: Harness, flavour: Flavour, mode: Mode
) -> None:
    """By the same owner: it gets the hold once, or finds it gone; never two of them."""
    if harness.name not in REQUESTS:
        pytest.skip("a take-over is one request there")

    async def use() -> None:
        for number in range(1, MOST):
            bench = Bench(harness, flavour)
            try:
                if not await _lost_once(bench, number, mode):
                    return
            finally:
                await bench.close()

    asyncio.run(use())


async def _lost_once(bench: Bench, number: int, mode: Mode) -> bool:
    """Whether a request of this number was sent, whose reply was lost."""
    ours, theirs, third = bench.peer(), bench.peer(), bench.peer()
    limit = 3 if mode is Mode.SLOTS else 0
    grant = await ours.take(bench.claim(mode=mode, limit=limit))
    handed = await ours.hand_over(grant)
    claim = bench.claim(mode=mode, limit=limit)
    taken = None
    word = REQUESTS[bench.harness.name]
    with losing(theirs.backend, word, number) as lost, suppress(BackendUnavailable):
        taken = await theirs.take_over(handed, claim)
    if lost:
        taken = await theirs.take_over(handed, claim)
    assert taken is not None, number
    (holder,) = (await third.look("name")).holders
    assert holder.token == taken.token > grant.token
    assert await third.take_over(handed, bench.claim(mode=mode, limit=limit)) is None
    assert not (await theirs.renew([taken])).lost
    assert await theirs.release(taken) is True
    assert not (await third.look("name")).holders
    return bool(lost)


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_take_over_is_undone_after_any_lost_reply(harness: Harness, flavour: Flavour) -> None:
    """By its claim alone: either nothing was taken, and the text is still good, or nothing is
    left."""
    if harness.name not in REQUESTS:
        pytest.skip("a take-over is one request there")

    async def use() -> None:
        for number in range(1, MOST):
            bench = Bench(harness, flavour)
            try:
                ours, theirs, third = bench.peer(), bench.peer(), bench.peer()
                handed = await ours.hand_over(await ours.take(bench.claim()))
                claim = bench.claim()
                word = REQUESTS[harness.name]
                with losing(theirs.backend, word, number) as lost, suppress(BackendUnavailable):
                    await theirs.take_over(handed, claim)
                await theirs.abandon(claim)
                holders = (await third.look("name")).holders
                taken = await third.take_over(handed, bench.claim())
                assert (taken is not None) == bool(holders)
                assert taken is None or await third.release(taken) is True
                if not lost:
                    return
            finally:
                await bench.close()

    asyncio.run(use())
