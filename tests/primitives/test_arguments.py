"""Arguments of the wrong type and words of other libraries are refused when they are given."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

import holdfast
from holdfast.errors import HoldfastError
from holdfast.primitives.spellings import ARGUMENTS

Call = Callable[[Any, Any], object]

WRONG_FLAGS = ["no", "", 0, 1, None, []]


@pytest.fixture
def locks() -> Iterator[Any]:
    """A client whose methods may be called with anything."""
    with holdfast.connect("memory://") as client:
        yield client


@pytest.mark.parametrize("value", WRONG_FLAGS)
@pytest.mark.parametrize("word", ["renew", "reentrant"])
@pytest.mark.parametrize("primitive", ["lock", "rwlock", "election"])
def test_a_flag_is_a_bool(locks: Any, primitive: str, word: str, value: object) -> None:
    """``renew="no"`` counted as true."""
    with pytest.raises(TypeError, match=f"{word} is True or False"):
        getattr(locks, primitive)("a", **{word: value})


@pytest.mark.parametrize("value", WRONG_FLAGS)
def test_wait_is_a_bool(locks: Any, value: object) -> None:
    with pytest.raises(TypeError, match="wait is True or False"):
        locks.once("k", wait=value)
    with pytest.raises(TypeError, match="wait is True or False"):
        locks.every(5, "k", wait=value)


@pytest.mark.parametrize("value", [3, None, "print", b""])
def test_on_lost_takes_a_function(locks: Any, value: object) -> None:
    """It was called much later, on another thread."""
    with locks.lock("a") as lease, pytest.raises(TypeError, match="takes a function"):
        lease.on_lost(value)
    with locks.multi(["a", "b"]) as several, pytest.raises(TypeError, match="takes a function"):
        several.on_lost(value)


REFUSED: list[tuple[str, Call, type[Exception]]] = [
    ("no name", lambda locks, value: locks.lock(value), TypeError),
    ("not several names", lambda locks, value: locks.multi(value), TypeError),
    ("no limit", lambda locks, value: locks.semaphore("s", value), ValueError),
    ("no permits", lambda locks, value: locks.semaphore("s", 4, permits=value), ValueError),
    ("no ttl", lambda locks, value: locks.lock("a", ttl=value), TypeError),
    ("no timeout", lambda locks, value: locks.lock("a", timeout=value), TypeError),
    ("no max_hold", lambda locks, value: locks.lock("a", max_hold=value), TypeError),
    ("no note", lambda locks, value: locks.lock("a", note=value), TypeError),
    ("no observation", lambda locks, value: locks.election("e").observe(value), TypeError),
    ("no key", lambda locks, value: locks.once(value), TypeError),
    ("no keep", lambda locks, value: locks.once("k", keep=value), TypeError),
    ("no errors", lambda locks, value: locks.once("k", errors=value), ValueError),
    ("no job", lambda locks, value: locks.once("k").run(value), TypeError),
    ("no function", lambda locks, value: locks.lock("a")(value), TypeError),
    ("no interval", lambda locks, value: locks.every(value, "k"), TypeError),
    ("no offset", lambda locks, value: locks.every(5, "k", offset=value), TypeError),
    ("no missed", lambda locks, value: locks.every(5, "k", missed=value), ValueError),
    ("no prefix", lambda locks, value: locks.list(value), TypeError),
    ("no length", lambda locks, value: locks.list(limit=value), ValueError),
    ("no namespace", lambda _, value: holdfast.connect("memory://", namespace=value), TypeError),
    ("no guarantees", lambda _, value: holdfast.connect("memory://", require=value), TypeError),
    ("no patience", lambda _, value: holdfast.connect("memory://", patience=value), TypeError),
    ("no number", lambda _, value: holdfast.connect("memory://", connections=value), ValueError),
    ("no epoch", lambda _, value: holdfast.connect("memory://", epoch=value), ValueError),
    ("no keys", lambda _, value: holdfast.connect("memory://", fence_keys=value), TypeError),
    ("no URL", lambda _, value: holdfast.connect(value), TypeError),
]


@pytest.mark.parametrize(
    ("call", "kind"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_wrong_types_are_refused_at_once(locks: Any, call: Call, kind: type[Exception]) -> None:
    """By an error of ours, before anything is made: a bare object fits no argument."""
    with pytest.raises(kind) as refused:
        call(locks, object())
    assert "iterable" not in str(refused.value)
    assert "attribute" not in str(refused.value)


def test_the_asyncio_client_refuses_them_too() -> None:
    locks: Any = holdfast.connect_async("memory://")
    with pytest.raises(TypeError, match="renew is True or False"):
        locks.lock("a", renew="no")
    with pytest.raises(TypeError, match="timeout is seconds"):
        locks.election("e").observe("soon")
    with pytest.raises(TypeError, match="in Holdfast it is 'timeout'"):
        locks.lock("a", blocking_timeout=3)


@pytest.mark.parametrize("value", ["", None, -1])
def test_at_least_is_a_duration(locks: Any, value: object) -> None:
    """An empty text counted as 0."""
    with locks.lock("a") as lease:
        lease.check(timedelta(0))
        with pytest.raises((TypeError, ValueError), match="at_least is"):
            lease.check(value)


class TestAcquire:
    """``acquire`` takes what ``threading.Lock.acquire`` takes."""

    @pytest.mark.parametrize("primitive", ["lock", "multi"])
    def test_one_that_does_not_wait_takes_no_timeout(self, locks: Any, primitive: str) -> None:
        lock = locks.lock("a") if primitive == "lock" else locks.multi(["a", "b"])
        for timeout in (1, 0.5, timedelta(seconds=1)):
            with pytest.raises(ValueError, match="takes no timeout"):
                lock.acquire(False, timeout)
        with pytest.raises(ValueError, match="timeout"):
            threading.Lock().acquire(False, 1)

    def test_what_means_no_waiting_is_taken(self, locks: Any) -> None:
        for arguments in ((False,), (False, 0), (False, None), (False, -1), (0,), (1, 0)):
            lease = locks.lock("a", timeout=9).acquire(*arguments)
            assert lease.release()

    @pytest.mark.parametrize("value", [5, "no", None, []])
    def test_blocking_is_a_bool(self, locks: Any, value: object) -> None:
        """In tooz a number is a timeout: here it waited for ever."""
        with pytest.raises(TypeError, match=r"True or False.*acquire\(timeout=…\)"):
            locks.lock("a").acquire(value)

    @pytest.mark.parametrize("primitive", ["lock", "multi"])
    def test_the_words_of_others_are_named(self, locks: Any, primitive: str) -> None:
        lock = locks.lock("a") if primitive == "lock" else locks.multi(["a", "b"])
        with pytest.raises(TypeError, match="'blocking_timeout': in Holdfast it is 'timeout'"):
            lock.acquire(blocking_timeout=3)
        with pytest.raises(TypeError, match="'patience': known are blocking, timeout"):
            lock.acquire(patience=3)

    def test_the_asyncio_client_says_the_same(self) -> None:
        async def main() -> None:
            async with holdfast.connect_async("memory://") as locks:
                lock: Any = locks.lock("a")
                with pytest.raises(ValueError, match="takes no timeout"):
                    await lock.acquire(False, 1)
                with pytest.raises(TypeError, match="do not poll"):
                    await lock.acquire(sleep=0.1)

        asyncio.run(main())


class TestOtherLibraries:
    """Their words raise errors that name ours."""

    @pytest.mark.parametrize("word", ARGUMENTS)
    def test_every_word_is_refused_with_a_hint(self, locks: Any, word: str) -> None:
        with pytest.raises(TypeError, match=f"unknown argument {word!r}: ") as refused:
            locks.lock("a", **{word: 3})
        assert "known are" not in str(refused.value)

    def test_the_two_timeouts_of_redis_py(self, locks: Any) -> None:
        """``timeout`` is taken already: so the error says what becomes of both."""
        with pytest.raises(TypeError, match=r"it is 'timeout'; .*'timeout' in redis-py.* is 'ttl'"):
            locks.lock("a", timeout=10, blocking_timeout=3)

    @pytest.mark.parametrize(
        ("word", "ours"),
        [
            ("owned", "in Holdfast it is lease.held"),
            ("extend", "lease.extend"),
            ("reacquire", "lease.extend"),
            ("is_locked", r"in Holdfast it is lock.locked\(\)"),
            ("contenders", "locks.inspect"),
            ("break_", "locks.break_lock"),
            ("token", "lease.token"),
            ("fence", "lease.fence"),
            ("remaining", "lease.remaining"),
        ],
    )
    def test_what_a_lock_does_not_have_is_named_with_its_place(
        self, locks: Any, word: str, ours: str
    ) -> None:
        with pytest.raises(AttributeError, match=f"has no attribute '{word}': .*{ours}"):
            getattr(locks.lock("a"), word)

    def test_other_attributes_are_missing_as_anywhere(self, locks: Any) -> None:
        lock = locks.lock("a")
        assert not hasattr(lock, "__aenter__")
        assert not hasattr(lock, "_released")
        with pytest.raises(AttributeError, match=r"^'Lock' object has no attribute 'colour'$"):
            _ = lock.colour


def test_release_of_what_is_not_held_is_a_runtime_error(locks: Any) -> None:
    """As in ``threading``: programs catch that."""
    with pytest.raises(RuntimeError):
        threading.Lock().release()
    with pytest.raises(RuntimeError) as refused:
        locks.lock("a").release()
    assert isinstance(refused.value, HoldfastError)


@pytest.mark.parametrize("namespace", ["", "a b", "é", "x" * 65, "a\n"])
def test_a_namespace_that_is_none_is_told_as_one(namespace: str) -> None:
    with pytest.raises(ValueError, match=r"^namespace has 1 to 64 letters"):
        holdfast.connect("memory://", namespace=namespace)
