"""Clients, locks, leases and jobs belong to one process: pickling and copying them says so."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast

TEXT = r"can't be pickled or copied: .*Open a client in each process; send the fence"

KINDS: dict[str, Callable[[Any], object]] = {
    "client": lambda locks: locks,
    "lock": lambda locks: locks.lock("a"),
    "lease": lambda locks: locks.lock("a").acquire(),
    "rwlock": lambda locks: locks.rwlock("a"),
    "read": lambda locks: locks.rwlock("a").read(),
    "semaphore": lambda locks: locks.semaphore("a", 4),
    "multi": lambda locks: locks.multi(["a", "b"]),
    "multilease": lambda locks: locks.multi(["a", "b"]).acquire(),
    "election": lambda locks: locks.election("a"),
    "once": lambda locks: locks.once("a"),
    "every": lambda locks: locks.every(5, "a"),
}


@pytest.fixture
def locks() -> Iterator[holdfast.Locks]:
    with holdfast.connect("memory://") as client:
        yield client


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_pickling_and_copying_are_refused(locks: holdfast.Locks, kind: str) -> None:
    made = KINDS[kind](locks)
    for send in (pickle.dumps, copy.copy, copy.deepcopy, lambda it: pickle.dumps({"argument": it})):
        with pytest.raises(TypeError, match=TEXT):
            send(made)


@pytest.mark.parametrize("kind", ["client", "lock", "once"])
def test_those_of_the_asyncio_client_are_refused_too(kind: str) -> None:
    with pytest.raises(TypeError, match=TEXT):
        pickle.dumps(KINDS[kind](holdfast.connect_async("memory://")))


def test_multiprocessing_by_spawn_says_it(locks: holdfast.Locks) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=print, args=(locks.lock("a"),))
    with pytest.raises(TypeError, match=TEXT):
        process.start()


def test_a_fence_can_be_sent(locks: holdfast.Locks) -> None:
    with locks.lock("a") as lease:
        assert pickle.loads(pickle.dumps(lease.fence)) == lease.fence


def test_a_decorated_job_still_has_a_key_per_call(locks: holdfast.Locks) -> None:
    """It makes a job of its own per call, without a copy."""
    ran: list[int] = []

    @locks.once("invoice:{number}")
    def send(number: int) -> int:
        ran.append(number)
        return number

    assert [send(1), send(2), send(1)] == [1, 2, 1]
    assert ran == [1, 2]
