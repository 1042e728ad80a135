"""Both clients have the same words."""

from __future__ import annotations

import inspect

import pytest

import holdfast
from holdfast.lease import AsyncLease, Lease
from holdfast.locks import Locks
from holdfast.locks_async import AsyncLocks
from holdfast.multilease import AsyncMultiLease, MultiLease
from holdfast.primitives.election import Election
from holdfast.primitives.election_async import AsyncElection
from holdfast.primitives.lock import Lock
from holdfast.primitives.lock_async import AsyncLock
from holdfast.primitives.multi import MultiLock
from holdfast.primitives.multi_async import AsyncMultiLock
from holdfast.primitives.once import Every, Once
from holdfast.primitives.once_async import AsyncEvery, AsyncOnce

TWINS = [
    (Locks, AsyncLocks),
    (Lock, AsyncLock),
    (Lease, AsyncLease),
    (MultiLock, AsyncMultiLock),
    (MultiLease, AsyncMultiLease),
    (Election, AsyncElection),
    (Once, AsyncOnce),
    (Every, AsyncEvery),
]


def words(kind: type) -> dict[str, object]:
    return {
        name: list(inspect.signature(member).parameters.values()) if callable(member) else None
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_")
    }


@pytest.mark.parametrize(("blocking", "asynchronous"), TWINS)
def test_twins_have_the_same_words(blocking: type, asynchronous: type) -> None:
    """A feature in one client is in the other, spelled alike."""
    one, other = words(blocking), words(asynchronous)
    assert one.keys() == other.keys()
    for name, parameters in one.items():
        theirs = other[name]
        assert str(parameters) == str(theirs), name


def test_connect_has_the_same_words() -> None:
    """The two ways in take the same arguments."""
    one = inspect.signature(holdfast.connect).parameters
    other = inspect.signature(holdfast.connect_async).parameters
    assert one == other
