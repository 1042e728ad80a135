"""Opening a subscription may take long: other waiters, and signal handlers in the same thread, do
not wait for it; and it ends at its deadline, and with the client."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pytest

import holdfast
from harnesses import harness_classes
from holdfast.core.contract import Settings
from holdfast.io.clock import now
from holdfast.stores.mysql import wakeups as mysql_listen
from holdfast.stores.postgres import connect as postgres
from holdfast.stores.postgres import wakeups as postgres_listen
from holdfast.stores.redis import connection as redis
from holdfast.stores.redlock import wakeups as redlock_wakeups
from holdfast.stores.sqlite import wakeups as sqlite_wakeups
from holdfast.testing import Flavour, Harness, loops
from holdfast.testing.contract import Bench, Peer
from holdfast.url import open_store
from servers.process import wait_until
from servers.proxy import Proxy

SOON = 30.0
LONG = 200.0
"""How long something may take that has no deadline of its own: far longer than ``SOON``."""

OPENERS: dict[str, tuple[tuple[type, str], tuple[type, str]]] = {
    "mysql": ((mysql_listen.SubscriptionOpener, "open"),) * 2,
    "postgres": (
        (postgres_listen.PostgresWakeups, "_share"),
        (postgres.PostgresConnector, "listen"),
    ),
    "redis": ((redis.Connector, "subscription"),) * 2,
    "redlock": ((redlock_wakeups.NameWakeups, "_attach"),) * 2,
    "sqlite": ((sqlite_wakeups.SocketFolder, "bind"),) * 2,
}
"""What opens the subscription of the blocking client, and of the asyncio client."""

both = pytest.mark.parametrize("flavour", list(Flavour))


def stores(*names: str) -> pytest.MarkDecorator:
    """Each of these stores."""
    chosen = [name for name in names if name in harness_classes()]
    return pytest.mark.parametrize("harness", chosen, indirect=True)


def on(harness: Harness, flavour: Flavour, body: Callable[[Bench], Awaitable[None]]) -> None:
    """Runs a test's body with a bench of its own."""

    async def run() -> None:
        bench = Bench(harness, flavour)
        try:
            await body(bench)
        finally:
            await bench.close()

    loops.run(run())


class Gate:
    """Holds the first caller that subscribes, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: str, flavour: Flavour) -> None:
        self._came, self._open = threading.Event(), threading.Event()
        kind, name = OPENERS[store][flavour is Flavour.ASYNCIO]
        real = getattr(kind, name)
        waits = flavour is Flavour.ASYNCIO and asyncio.iscoroutinefunction(real)

        def begin(*args: Any) -> Any:
            if self._came.is_set():
                return real(*args)
            self._came.set()
            if waits:
                return self._later(real, args)
            assert self._open.wait(LONG)
            return real(*args)

        monkeypatch.setattr(kind, name, begin)

    async def _later(self, real: Any, args: Any) -> Any:
        await asyncio.to_thread(self._open.wait, LONG)
        return await real(*args)

    async def come(self) -> None:
        """Returns when a caller is held."""
        assert await asyncio.to_thread(self._came.wait, SOON)

    def open(self) -> None:
        self._open.set()


@both
@stores("mysql", "postgres", "redis", "redlock")
def test_other_waiters_do_not_wait_for_a_subscription_to_open(
    harness: Harness, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They poll, and find that a name is free."""
    gate = Gate(monkeypatch, harness.name, flavour)

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(request=LONG), bench.peer()
        one, other = [await theirs.take(bench.claim(name)) for name in ("one", "other")]
        begins = asyncio.create_task(ours.get(bench.claim("one"), LONG))
        try:
            await gate.come()
            claim = bench.claim("other")
            busy = await ours.queue(claim)
            async with asyncio.timeout(SOON):
                await ours.wait(claim, busy, now() + LONG)
                assert await theirs.release(other)
                assert (await ours.get(claim, SOON)).token > other.token
            assert not begins.done()
        finally:
            gate.open()
        assert await theirs.release(one)
        async with asyncio.timeout(SOON):
            assert (await begins).token > one.token

    on(harness, flavour, body)


@contextmanager
def overlooking(proxy: Proxy) -> Iterator[None]:
    """Existing connections work; new connections get no answer."""
    pump = proxy._pump
    listener = pump.listener
    pump.do(lambda: setattr(pump, "listener", None))
    try:
        yield
    finally:
        pump.do(lambda: setattr(pump, "listener", listener))


@both
@stores("mysql", "postgres", "redis")
def test_a_waiter_that_opens_a_subscription_keeps_its_timeout(
    harness: Any, flavour: Flavour
) -> None:
    """If the server does not answer, and a request might take minutes."""

    async def body(bench: Bench) -> None:
        url = harness.proxied_url
        if harness.name == "postgres":  # which listens on what is connected, if it can
            url = f"{harness.url}?listen_url={quote(url, safe='')}"
        settings = Settings(namespace=bench.namespace, request_seconds=LONG)
        ours = Peer(open_store(url, settings), flavour, bench.workers)
        try:
            await bench.peer().take(bench.claim())
            claim = bench.claim()
            busy = await ours.queue(claim)
            with overlooking(harness.proxies[0]):
                began = now()
                await ours.wait(claim, busy, began + 0.3)
                assert now() - began < LONG / 10
                await ours.abandon(claim)
        finally:
            await ours.close()

    on(harness, flavour, body)


@both
@stores("mysql", "postgres", "redis")
def test_a_client_closed_while_it_subscribes_keeps_no_connection(
    harness: Any, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the connection of the subscription, nor that of an undone claim."""
    gate = Gate(monkeypatch, harness.name, flavour)
    before = harness.proxies[0].open_connections

    async def body(bench: Bench) -> None:
        ours, claim = bench.peer(proxied=True), bench.claim()
        await bench.peer().take(bench.claim())

        async def wait() -> None:
            await ours.wait(claim, await ours.queue(claim), now() + LONG)
            await ours.abandon(claim)

        waits = asyncio.create_task(wait())
        try:
            await gate.come()
            await ours.close()
        finally:
            gate.open()
        async with asyncio.timeout(SOON):
            await waits
            left = lambda: harness.proxies[0].open_connections <= before  # noqa: E731
            await asyncio.to_thread(wait_until, "the end", left, SOON)

    on(harness, flavour, body)


@pytest.mark.timeout(90)
@stores("mysql", "postgres", "redis", "redlock", "sqlite")
def test_a_signal_handler_may_wait_while_its_thread_subscribes(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It polls until its own deadline, and does not wait for its own thread."""
    struck = threading.Event()
    results: list[object] = []
    kind, name = OPENERS[harness.name][0]
    real = getattr(kind, name)

    def begin(*args: Any) -> Any:
        if not struck.is_set():
            struck.set()
            signal.raise_signal(signal.SIGUSR1)
        return real(*args)

    with holdfast.connect(harness.url) as ours, holdfast.connect(harness.url) as theirs:
        one, other = theirs.lock("one").acquire(), theirs.lock("other").acquire()
        assert one is not None
        assert other is not None

        def handle(*_: object) -> None:
            results.append(ours.lock("other").acquire(timeout=1))
            assert one.release()

        before = signal.signal(signal.SIGUSR1, handle)
        monkeypatch.setattr(kind, name, begin)
        try:
            with ours.lock("one", timeout=SOON) as lease:
                assert lease.token > one.token
        finally:
            signal.signal(signal.SIGUSR1, before)
            other.release()
    assert results == [None]
