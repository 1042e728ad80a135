"""What tests of both SQL stores share: servers whose sessions can be told apart and ended, and
clients of either kind, so that a body is written once.

Fixtures are taken over by name: ``store, clients = sql_helpers.store, sql_helpers.clients``.
"""

from __future__ import annotations

import asyncio
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pymysql
import pytest

from holdfast.testing import Flavour
from holdfast.testing.clients import open_client
from holdfast.testing.conformance.bench import eventually
from holdfast.testing.workers import Workers
from servers.mysql import MySQLServer
from servers.postgres import PostgresServer
from servers.process import Server
from servers.proxy import Proxy
from servers.registry import Servers
from stores.mysql import bench as mysql_bench

if TYPE_CHECKING:
    from holdfast import AsyncLease, AsyncLock, AsyncLocks

__all__ = [
    "LONG",
    "MODES",
    "SECONDS",
    "Clients",
    "Store",
    "clients",
    "only_woken",
    "release_to_waiter",
    "store",
    "until",
    "wait_for_waiters",
]

MODES = ("lease", "advisory")
LONG = 600.0
"""A ttl of which a third is longer than any test: no renewal tells of anything."""
SECONDS = 60.0
"""Far more than anything here takes, on a machine that is busy."""


class Store(ABC):
    """A running server, and one who may look at all sessions and end them."""

    server: Server

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def url(self, mode: str = "lease", mark: str = "", proxy: Proxy | None = None) -> str:
        """Of the server itself or through a proxy. The sessions of a mark can be told from all
        others."""
        plain = self.server.url if proxy is None else proxy.url
        return self._marked(f"{plain}?mode={mode}", mark) if mark else f"{plain}?mode={mode}"

    @abstractmethod
    def _marked(self, url: str, mark: str) -> str: ...
    @abstractmethod
    def sessions(self, mark: str) -> set[int]: ...
    @abstractmethod
    def kill(self, session: int) -> None: ...
    @abstractmethod
    def close(self) -> None: ...

    async def kill_all(self, mark: str) -> None:
        """Ends all sessions that a mark has, and returns once they are gone. Between two requests
        there may be none: an asyncio client that waits opens one when it asks again."""
        found: set[int] = set()

        def some() -> bool:
            found.update(self.sessions(mark))
            return bool(found)

        await until(some, f"no session of {mark!r} came")
        for session in found:  # not on the loop: one that stands still hears of no end
            await asyncio.to_thread(self.kill, session)
        await until(lambda: not found & self.sessions(mark), "they were not killed")


class Postgres(Store):
    """Marks are names of applications."""

    def __init__(self, servers: Servers, namespace: str) -> None:
        super().__init__(namespace)
        self.server = servers.of(PostgresServer)
        self._admin = psycopg.connect(self.server.url, autocommit=True)

    def _marked(self, url: str, mark: str) -> str:
        return f"{url}&application_name={mark}-{self._namespace}"

    def sessions(self, mark: str) -> set[int]:
        sql = "SELECT pid FROM pg_stat_activity WHERE application_name = %s"
        return {row[0] for row in self._admin.execute(sql, (f"{mark}-{self._namespace}",))}

    def kill(self, session: int) -> None:
        self._admin.execute("SELECT pg_terminate_backend(%s, 5000)", (session,))

    def close(self) -> None:
        self._admin.close()


class MySQL(Store):
    """Marks are accounts."""

    def __init__(self, servers: Servers, namespace: str) -> None:
        super().__init__(namespace)
        self.server = server = servers.of(MySQLServer)
        self._admin = mysql_bench.open_admin(server)
        self._accounts: dict[str, str] = {}
        """A URL of each, as ``mysql_bench`` knows them."""

    def _marked(self, url: str, mark: str) -> str:
        assert isinstance(self.server, MySQLServer)
        if mark not in self._accounts:
            self._accounts[mark] = mysql_bench.account(self.server, self._admin)
        return self._accounts[mark].partition("@")[0] + "@" + url.partition("@")[2]

    def sessions(self, mark: str) -> set[int]:
        return set(mysql_bench.sessions(self._admin, self._accounts[mark]))

    def kill(self, session: int) -> None:
        with suppress(pymysql.MySQLError):  # it has just gone by itself
            mysql_bench.rows(self._admin, f"KILL {session}")

    def close(self) -> None:
        self._admin.close()


@pytest.fixture(params=[Postgres, MySQL], ids=["postgres", "mysql"])
def store(request: pytest.FixtureRequest, servers: Servers, namespace: str) -> Iterator[Store]:
    made: Store = request.param(servers, namespace)
    yield made
    made.close()


class Clients:
    """Clients of one kind, in one namespace."""

    def __init__(self, flavour: Flavour, namespace: str) -> None:
        self._flavour, self._namespace = flavour, namespace
        self._workers = Workers()
        self._open: list[AsyncLocks] = []

    def open(self, url: str, **options: Any) -> AsyncLocks:
        """Another client, as another process would open it."""
        # Nobody looks a last time because its own time is over: it is the body that is bounded.
        options = {"namespace": self._namespace, "timeout": LONG} | options
        client = open_client(url, self._flavour, self._workers.run, **options)
        self._open.append(client)
        return client

    def run(self, body: Callable[[], Awaitable[None]]) -> None:
        """Runs the body and closes the clients that it opened."""

        async def whole() -> None:
            try:
                async with asyncio.timeout(2 * SECONDS):
                    await body()
            finally:
                with warnings.catch_warnings():
                    # A body that failed half-way leaves holds behind; its own failure counts.
                    warnings.simplefilter("ignore", ResourceWarning)
                    for client in self._open:
                        await client.close()
                self._workers.close()

        asyncio.run(whole())


@pytest.fixture(params=list(Flavour))
def clients(request: pytest.FixtureRequest, namespace: str) -> Clients:
    return Clients(request.param, namespace)


@pytest.fixture
def only_woken(no_recheck: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks by itself, and no renewer tells a waiter that its place is gone."""
    monkeypatch.setattr("holdfast.core.renewer.REFRESH_SECONDS", LONG)


async def until(condition: Callable[[], object], otherwise: str) -> None:
    """Returns once the condition holds."""

    async def holds() -> bool:
        return bool(condition())

    await eventually(holds, SECONDS, otherwise)


async def wait_for_waiters(client: AsyncLocks, name: str = "name", count: int = 1) -> None:
    """Returns once so many stand in the store's line."""

    async def stand() -> bool:
        return len((await client.inspect(name)).waiters) == count

    await eventually(stand, SECONDS, f"{count} did not come to stand in line for {name!r}")


async def release_to_waiter(held: AsyncLease, wanted: AsyncLock, looking: AsyncLocks) -> AsyncLease:
    """Releases what is held once somebody waits for it, who gets it, with a higher token."""
    waiting = asyncio.create_task(wanted.acquire())
    await wait_for_waiters(looking, held.name)
    assert not waiting.done()
    assert await held.release() is True
    taken = await waiting
    assert taken is not None
    assert taken.token > held.token
    return taken
