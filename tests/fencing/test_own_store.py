"""Guarded writes in the lock's own store: etcd, Consul, ZooKeeper."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import holdfast
from harnesses.consul import ConsulHarness
from harnesses.etcd import EtcdHarness
from harnesses.zookeeper import ZooKeeperHarness
from holdfast import Fence, Mode, StaleFence, fencing
from holdfast.testing import Flavour, Harness
from holdfast.testing.clients import open_client
from holdfast.testing.workers import Workers
from servers.missing import ServerMissing, required

STORES: dict[str, type[Harness]] = {
    "etcd": EtcdHarness,
    "consul": ConsulHarness,
    "zookeeper": ZooKeeperHarness,
}
ROOTS = {"etcd": "app", "consul": "app", "zookeeper": "/app"}


@pytest.fixture(scope="module", params=list(STORES))
def store(request: pytest.FixtureRequest) -> Iterator[Harness]:
    made = STORES[request.param]()
    try:
        made.start()
    except ServerMissing as missing:
        if required():
            raise
        pytest.skip(str(missing))
    yield made
    made.stop()


class Bench:
    """Clients of one flavour to one store, and a key of its own."""

    def __init__(self, store: Harness, flavour: Flavour) -> None:
        self.store, self.flavour = store, flavour
        self.namespace = f"t{secrets.token_hex(6)}"
        self.key = f"{ROOTS[store.name]}/{self.namespace}/config ü"
        self.workers = Workers()

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[tuple[Any, Any]]:
        options = {"namespace": self.namespace, "ttl": 10}
        opened = [
            open_client(self.store.url, self.flavour, self.workers.run, **options) for _ in range(2)
        ]
        try:
            yield opened[0], opened[1]
        finally:
            for client in opened:
                await client.close()
            self.workers.close()

    def guard(self, lease: Any) -> Any:
        """The guard, with words that are awaited on both clients."""
        module = getattr(fencing, self.store.name)
        if self.flavour is Flavour.ASYNCIO:
            return module.guard(lease)
        return Awaited(module.guard(lease._inner), self.workers)

    def run(self, body: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with asyncio.timeout(60):
                await body()

        asyncio.run(whole())


class Awaited:
    """A blocking guard, called in the task's own thread."""

    def __init__(self, inner: Any, workers: Workers) -> None:
        self._inner, self._workers = inner, workers

    def __getattr__(self, word: str) -> Any:
        method = getattr(self._inner, word)
        return lambda *args: self._workers.run(lambda: method(*args))


@pytest.fixture(params=list(Flavour))
def bench(request: pytest.FixtureRequest, store: Harness) -> Bench:
    return Bench(store, request.param)


def test_its_words(bench: Bench) -> None:
    async def body() -> None:
        async with bench.clients() as (client, _), client.lock("lock") as lease:
            guard = bench.guard(lease)
            assert await guard.get(bench.key) is None
            assert await guard.delete(bench.key) is False
            for value in (b"\0\xff", b"", "text ü", b"last"):
                await guard.put(bench.key, value)
                stored = value.encode() if isinstance(value, str) else value
                assert await guard.get(bench.key) == stored
            assert await guard.delete(bench.key) is True
            assert await guard.get(bench.key) is None

    bench.run(body)


def test_no_update_is_lost(bench: Bench) -> None:
    """A reads and pauses; its hold ends; B is granted and reads before A goes on."""

    async def body() -> None:
        async with bench.clients() as (first, second):
            lease_of_a = await first.lock("lock").acquire()
            a = bench.guard(lease_of_a)
            await a.put(bench.key, "0")
            of_a = int(await a.get(bench.key))
            await second.break_lock("lock", reason="as if it had run out")
            async with second.lock("lock", timeout=20) as lease_of_b:
                b = bench.guard(lease_of_b)
                of_b = int(await b.get(bench.key))
                for act in (a.put(bench.key, str(of_a + 1)), a.get(bench.key), a.delete(bench.key)):
                    with pytest.raises(StaleFence) as caught:
                        await act
                    error = caught.value
                    assert error.fence is not None
                    assert error.highest is not None
                    assert error.fence.token < error.highest.token == lease_of_b.token
                    assert f"token {lease_of_b.token}" in str(error)
                await b.put(bench.key, str(of_b + 1))
                assert await b.get(bench.key) == b"1"
            await lease_of_a.release()

    bench.run(body)


def test_checking_before_writing_loses_one(bench: Bench) -> None:
    """The mutant: the check and the write are two steps, and the hold ends between them."""

    async def body() -> None:
        async with bench.clients() as (first, second):
            lease_of_a = await first.lock("lock").acquire()
            a = bench.guard(lease_of_a)
            await a.put(bench.key, "0")
            of_a = int(await a.get(bench.key))  # the check: all is well
            await second.break_lock("lock", reason="as if it had run out")
            async with second.lock("lock", timeout=20) as lease_of_b:
                b = bench.guard(lease_of_b)
                of_b = int(await b.get(bench.key))
                await b.put(bench.key, str(of_a + 1))  # A's write, unchecked: two were accepted
                await b.put(bench.key, str(of_b + 1))
                assert await b.get(bench.key) == b"1"
            await lease_of_a.release()

    bench.run(body)


def test_a_released_hold_writes_nothing(bench: Bench) -> None:
    async def body() -> None:
        async with bench.clients() as (client, other):
            async with client.lock("lock") as lease:
                guard = bench.guard(lease)
            with pytest.raises(StaleFence, match="that hold has ended; nobody holds it now"):
                await guard.put(bench.key, "late")
            async with other.lock("lock") as fresh:
                assert await bench.guard(fresh).get(bench.key) is None

    bench.run(body)


def test_readers_and_permits(bench: Bench) -> None:
    """Two valid readers in any order, and an older valid permit: all go through."""

    async def body() -> None:
        async with bench.clients() as (first, second):
            async with first.rwlock("rw").read() as one, second.rwlock("rw").read() as other:
                for lease in (other, one):
                    assert await bench.guard(lease).get(bench.key) is None
            async with first.semaphore("s", 2) as older, second.semaphore("s", 2) as newer:
                await bench.guard(newer).put(bench.key, "newer")
                await bench.guard(older).put(bench.key, "older")
                assert await bench.guard(newer).get(bench.key) == b"older"

    bench.run(body)


def test_a_hold_that_was_extended(bench: Bench) -> None:
    """It may have moved to another session of the store."""

    async def body() -> None:
        async with bench.clients() as (client, _), client.lock("lock") as lease:
            guard = bench.guard(lease)
            await guard.put(bench.key, "before")
            await lease.extend(20)
            await guard.put(bench.key, "after")
            assert await guard.get(bench.key) == b"after"

    bench.run(body)


def test_a_permit_that_was_waited_for(bench: Bench) -> None:
    """Its token may be younger than its place in line; the guard knows the hold all the same."""

    async def body() -> None:
        async with bench.clients() as (first, second):
            one = await first.semaphore("s", 1).acquire()
            waiting = asyncio.create_task(second.semaphore("s", 1).acquire())
            await asyncio.wait([waiting], timeout=0.2)  # until it stands in line
            guard = bench.guard(one)
            await guard.put(bench.key, "one")
            await one.release()
            other = await waiting
            assert other.token > one.token
            for word, ttl in (("two", 20), ("three", 40)):
                await bench.guard(other).put(bench.key, word)
                await other.extend(ttl)
                with pytest.raises(StaleFence, match=f"token {other.token} holds it"):
                    await guard.put(bench.key, "late")
            assert await bench.guard(other).get(bench.key) == b"three"
            await first.break_lock("s", reason="a test")
            with pytest.raises(StaleFence, match="nobody holds it now"):
                await bench.guard(other).put(bench.key, "late")
            await other.release()

    bench.run(body)


def test_bad_input(bench: Bench) -> None:
    async def body() -> None:
        async with bench.clients() as (client, _), client.lock("lock") as lease:
            guard = bench.guard(lease)
            own = f"{'/' if bench.store.name == 'zookeeper' else ''}{bench.namespace}/locks/x"
            for key in ("", "a\0b", own):
                with pytest.raises(ValueError, match="key"):
                    await guard.put(key, "x")

    bench.run(body)


def test_a_lock_that_is_elsewhere() -> None:
    with holdfast.connect("memory://elsewhere") as locks, locks.lock("lock") as lease:
        for name in STORES:
            with pytest.raises(TypeError, match="guard the resource where it lives"):
                getattr(fencing, name).guard(lease)
    with pytest.raises(TypeError, match="takes the lease itself"):
        fencing.etcd.guard(Fence("lock", Mode.EXCLUSIVE, (), 0, 5))
