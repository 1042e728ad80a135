"""Lost wake-ups: a waiter also polls, so it acquires the lock without a message."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import holdfast
from harnesses.redlock import mark_as_new
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.stores.redlock.wakeups import Listeners
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from servers.ensemble import Ensemble
from servers.process import wait_until
from servers.redis import RedisServer
from servers.registry import Servers
from stores.redis.helpers import over, swallow_messages, waiter_sleeps


@pytest.fixture(params=["redis", "redlock"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Servers whose messages are dropped by the clients."""
    _swallow_messages(monkeypatch)
    monkeypatch.setattr("holdfast.core.acquire.RECHECK_SECONDS", (1.0, 1.5))
    with Store(request.param, 3 if request.param == "redlock" else 1) as store:
        yield store


class Store(Ensemble[RedisServer]):
    """One server, or a majority of three."""

    def __init__(self, scheme: str, count: int) -> None:
        super().__init__([RedisServer() for _ in range(count)])
        self.url = f"{scheme}://{self.hosts}"

    def wait_ready(self) -> None:
        super().wait_ready()
        if self.url.startswith("redlock"):
            mark_as_new(self.url)

    def wait_for_waiter(self) -> None:
        """Returns when the waiter is subscribed and sends nothing."""
        wait_until("the waiter", partial(waiter_sleeps, self.nodes[0]))


def _swallow_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    read_message = Listeners.read_message

    def drop_messages(listeners: Listeners, message: list[bytes]) -> list[str]:
        return [] if message[0] == b"message" else read_message(listeners, message)

    swallow_messages(monkeypatch)
    monkeypatch.setattr(Listeners, "read_message", drop_messages)


def test_a_waiter_without_messages_polls(store: Store) -> None:
    """The message of the release is dropped, and the ttl is long."""
    with (
        holdfast.connect(store.url, ttl=60) as ours,
        holdfast.connect(store.url, ttl=60) as theirs,
        ThreadPoolExecutor() as pool,
    ):

        def get() -> int:
            with theirs.lock("name", timeout=30) as lease:
                return lease.token

        with ours.lock("name") as held:
            waiting = pool.submit(get)
            store.wait_for_waiter()
        assert waiting.result(40) > held.token


def test_a_waiter_without_messages_polls_async(store: Store) -> None:
    """The same through the asyncio client."""

    async def main() -> None:
        async with (
            holdfast.connect_async(store.url, ttl=60) as ours,
            holdfast.connect_async(store.url, ttl=60) as theirs,
        ):

            async def get() -> int:
                async with theirs.lock("name", timeout=30) as lease:
                    return lease.token

            async with ours.lock("name") as held:
                waiting = asyncio.create_task(get())
                await asyncio.to_thread(store.wait_for_waiter)
            assert await waiting > held.token

    asyncio.run(main())


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_replaced_subscription_ends_the_wait(servers: Servers, late: bool) -> None:
    """The subscription is replaced just before or just after the waiter starts to wait: messages in
    between are lost, so the waiter must return and attempt again."""
    server = servers.of(RedisServer)

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        backend: Any = peer.backend
        wakeups, subscribe = backend._wakeups, backend._subscribe
        await peer.take(bench.claim())
        claim = bench.claim()
        await peer.wait(claim, await peer.queue(claim), now())  # subscribes
        busy = await peer.queue(claim)
        hub = wakeups._hub
        wait = hub.wait

        def replace() -> None:
            if late:
                wait_until("the waiter", lambda: bool(hub._waiting))
            run_now(wakeups._subscribe(now() + 30, subscribe))

        def interfere(*words: Any) -> Any:
            wakeups.drop()
            thread = threading.Thread(target=replace)
            thread.start()
            if not late:
                thread.join()
            return wait(*words)

        hub.wait = interfere
        async with asyncio.timeout(30):
            assert await peer.wait(claim, busy, now() + 60) is None

    over(server.url, Flavour.BLOCKING, body)
