"""Helpers: a contract bench over any Redis URL, blocking or asyncio, and a server's state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from holdfast.core.contract import Settings
from holdfast.io.clock import now
from holdfast.io.wakeups import Messages
from holdfast.stores.redis.routes import key_slot
from holdfast.testing import Flavour, Harness
from holdfast.testing.clients import open_client
from holdfast.testing.contract import Bench, Peer
from holdfast.testing.workers import Workers
from holdfast.url import open_store
from servers.redis import RedisServer
from servers.redis_cluster import ClusterNode, RedisCluster

__all__ = [
    "LONGEST_SECONDS",
    "Slot",
    "blocking_and_asyncio",
    "channels",
    "client_peer",
    "clients",
    "connections",
    "cut_off",
    "keys",
    "listening",
    "over",
    "replicated",
    "scripts_run",
    "swallow_messages",
    "until",
    "waiter_sleeps",
]

LONGEST_SECONDS = 60.0
READY_SECONDS = 30.0
blocking_and_asyncio = pytest.mark.parametrize("flavour", list(Flavour))


class UrlHarness(Harness):
    """A harness for servers that the test has started."""

    name = "redis"

    def __init__(self, url: str, proxied_url: str = "") -> None:
        self.url = url
        self._proxied = proxied_url or url

    @property
    def proxied_url(self) -> str:
        return self._proxied


def over(
    url: str, flavour: Flavour, body: Callable[[Bench], Awaitable[None]], proxied_url: str = ""
) -> None:
    """Runs a test's body with a bench of its own."""

    async def run() -> None:
        bench = Bench(UrlHarness(url, proxied_url), flavour)
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                await body(bench)
        finally:
            await bench.close()

    asyncio.run(run())


@asynccontextmanager
async def clients(
    url: str, flavour: Flavour, count: int = 1, **options: Any
) -> AsyncIterator[list[Any]]:
    """Clients of one store, with the asyncio interface in both flavours; closed at the end."""
    workers = Workers()
    opened = [open_client(url, flavour, workers.run, **options) for _ in range(count)]
    try:
        async with asyncio.timeout(2 * LONGEST_SECONDS):
            yield opened
    finally:
        for locks in opened:
            await locks.close()
        workers.close()


def client_peer(bench: Bench, client: Any, scheme: str = "redis") -> Peer:
    """A peer that takes its settings from a user's own client."""
    settings = Settings(namespace=bench.namespace, client=client)
    peer = Peer(open_store(f"{scheme}://", settings), bench.flavour, bench.workers)
    bench._peers.append(peer)
    return peer


def keys(server: RedisServer, namespace: str) -> list[str]:
    """The keys that a namespace has on a server."""
    found = server.ask("KEYS", f"{namespace}:*")
    assert isinstance(found, list)
    return sorted(map(str, found))


def connections(server: RedisServer) -> int:
    """The number of connected clients, without the connection of this request."""
    return len(str(server.ask("CLIENT", "LIST")).splitlines()) - 1


def scripts_run(server: RedisServer) -> int:
    """How many scripts a server has run."""
    return sum(
        int(line.split("calls=")[1].split(",")[0])
        for line in str(server.ask("INFO", "commandstats")).splitlines()
        if line.startswith(("cmdstat_eval:", "cmdstat_evalsha:"))
    )


def waiter_sleeps(server: RedisServer) -> bool:
    """True if a client is subscribed, and no script has run for 0.3 s."""
    before = scripts_run(server)
    time.sleep(0.3)
    listening = server.ask("CLIENT", "LIST", "TYPE", "pubsub")
    return bool(listening) and before == scripts_run(server)


def channels(server: RedisServer, namespace: str) -> list[str]:
    """The channels with subscribers: one per client; with Redlock, one per name with waiters."""
    found = server.ask("PUBSUB", "CHANNELS", f"{namespace}*:wake:*")
    assert isinstance(found, list)
    return [str(channel) for channel in found]


def listening(server: RedisServer, namespace: str, name: str = "name") -> int:
    """The number of queue entries that name a channel."""
    entries = server.ask("HVALS", f"{namespace}:{{{name}}}")
    assert isinstance(entries, list)
    return sum(":wake:" in str(entry) for entry in entries)


async def until(true: Callable[[], bool]) -> None:
    """Returns once ``true()`` is true. A server that does not answer counts as false."""
    deadline = now() + READY_SECONDS
    while True:
        with suppress(OSError):
            if true():
                return
        assert now() < deadline, "the condition did not become true in time"
        await asyncio.sleep(0.01)


async def replicated(server: RedisServer) -> None:
    """Returns once a replica has all writes of the server."""

    def followed() -> bool:
        lines = str(server.ask("INFO", "replication")).splitlines()
        info = dict(line.split(":", 1) for line in lines if ":" in line)
        mark = f"state=online,offset={info['master_repl_offset']},"
        return any(mark in line for line in info.values())

    await until(followed)


def cut_off(master: RedisServer) -> None:
    """Stops replication: replicas get no further writes; the master goes on as before."""
    master.ask("ACL", "SETUSER", "default", "-psync", "-sync")
    master.ask("CLIENT", "KILL", "TYPE", "replica")


class Slot:
    """A slot that moves from one node of a cluster to another, step by step."""

    def __init__(self, cluster: RedisCluster, key: str) -> None:
        self.number = str(key_slot(key))
        row = key_slot(key) * len(cluster.masters) // 16_384
        owners = [*cluster.masters[row - 1 : row + 1], *cluster.masters]
        self.source = next(node for node in owners if self._keys(node))
        self.target = next(node for node in cluster.masters if node is not self.source)
        self._cluster = cluster

    def _keys(self, node: ClusterNode) -> list[str]:
        reply = node.ask("CLUSTER", "GETKEYSINSLOT", self.number, "100")
        assert isinstance(reply, list)
        return [str(key) for key in reply]

    def begin(self) -> None:
        self.target.ask("CLUSTER", "SETSLOT", self.number, "IMPORTING", self.source.id)
        self.source.ask("CLUSTER", "SETSLOT", self.number, "MIGRATING", self.target.id)

    def move(self, *keys: str) -> None:
        """Moves these keys, or all remaining ones."""
        for key in keys or self._keys(self.source):
            target = (self.target.host, str(self.target.port), key, "0", "5000")
            assert self.source.ask("MIGRATE", *target) == "OK"

    def end(self) -> None:
        for node in (self.target, *self._cluster.masters):
            node.ask("CLUSTER", "SETSLOT", self.number, "NODE", self.target.id)


def swallow_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of this process subscribe, and drop all messages."""

    read: Any = Messages.read

    def read_nothing(subscription: Messages) -> list[str]:
        read(subscription)
        subscription.values.clear()
        return []

    monkeypatch.setattr(Messages, "read", read_nothing)
