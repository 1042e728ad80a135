"""Helpers for tests of PostgreSQL and MySQL: a test body is written once for both stores and for
both kinds of client. The sessions of one client can be listed and killed.

Test modules take the fixtures by name: ``store, clients = sql_helpers.store, sql_helpers.clients``
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
from stores.mysql import helpers as mysql_helpers

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
"""A ttl of which a third is longer than any test: no renewal takes place."""
SECONDS = 60.0
"""Far more than any step here takes, also on a busy machine."""


class Store(ABC):
    """A running server, and an administrator who can list and kill all sessions."""

    server: Server

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def url(self, mode: str = "lease", mark: str = "", proxy: Proxy | None = None) -> str:
        """Return the URL of the server, or of a proxy. Sessions with a mark can be listed by it."""
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
        """Kill all sessions with a mark, and return when they are gone. Between two requests there
        may be none: an asyncio client that waits opens one for its next attempt."""
        found: set[int] = set()

        def some() -> bool:
            found.update(self.sessions(mark))
            return bool(found)

        await until(some, f"no session with the mark {mark!r}")
        for (
            session
        ) in found:  # in a thread: a blocked event loop would not see the end of its session
            await asyncio.to_thread(self.kill, session)
        await until(lambda: not found & self.sessions(mark), "they were not killed")


class Postgres(Store):
    """A mark is an ``application_name``."""

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
    """A mark is a user account."""

    def __init__(self, servers: Servers, namespace: str) -> None:
        super().__init__(namespace)
        self.server = server = servers.of(MySQLServer)
        self._admin = mysql_helpers.open_admin(server)
        self._accounts: dict[str, str] = {}
        """A URL of each, as ``mysql_helpers`` knows them."""

    def _marked(self, url: str, mark: str) -> str:
        assert isinstance(self.server, MySQLServer)
        if mark not in self._accounts:
            self._accounts[mark] = mysql_helpers.account(self.server, self._admin)
        return self._accounts[mark].partition("@")[0] + "@" + url.partition("@")[2]

    def sessions(self, mark: str) -> set[int]:
        return set(mysql_helpers.sessions(self._admin, self._accounts[mark]))

    def kill(self, session: int) -> None:
        with suppress(pymysql.MySQLError):  # it has just gone by itself
            mysql_helpers.rows(self._admin, f"KILL {session}")

    def close(self) -> None:
        self._admin.close()


@pytest.fixture(params=[Postgres, MySQL], ids=["postgres", "mysql"])
def store(request: pytest.FixtureRequest, servers: Servers, namespace: str) -> Iterator[Store]:
    made: Store = request.param(servers, namespace)
    yield made
    made.close()


class Clients:
    """Clients of one kind in one namespace."""

    def __init__(self, flavour: Flavour, namespace: str) -> None:
        self._flavour, self._namespace = flavour, namespace
        self._workers = Workers()
        self._open: list[AsyncLocks] = []

    def open(self, url: str, **options: Any) -> AsyncLocks:
        """Open a client, as another process would."""
        # A waiter that times out attempts a last time: so the body is bounded, not the waiter.
        options = {"namespace": self._namespace, "timeout": LONG} | options
        client = open_client(url, self._flavour, self._workers.run, **options)
        self._open.append(client)
        return client

    def run(self, body: Callable[[], Awaitable[None]]) -> None:
        """Run the body, and close the clients that it opened."""

        async def whole() -> None:
            try:
                async with asyncio.timeout(2 * SECONDS):
                    await body()
            finally:
                with warnings.catch_warnings():
                    # A body that failed leaves holds behind; its own failure is reported.
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
    """Waiters do not poll, and no renewer refreshes their entries in the queue."""
    monkeypatch.setattr("holdfast.core.renewer.REFRESH_SECONDS", LONG)


async def until(condition: Callable[[], object], otherwise: str) -> None:
    """Wait until the condition holds; fail with the message ``otherwise``."""

    async def holds() -> bool:
        return bool(condition())

    await eventually(holds, SECONDS, otherwise)


async def wait_for_waiters(client: AsyncLocks, name: str = "name", count: int = 1) -> None:
    """Wait until so many claims wait in the store's queue."""

    async def queued() -> bool:
        return len((await client.inspect(name)).waiters) == count

    await eventually(queued, SECONDS, f"there are not {count} waiters for {name!r}")


async def release_to_waiter(held: AsyncLease, wanted: AsyncLock, looking: AsyncLocks) -> AsyncLease:
    """Release a hold once ``wanted`` waits for it; return the waiter's lease, which has a higher
    token."""
    waiting = asyncio.create_task(wanted.acquire())
    await wait_for_waiters(looking, held.name)
    assert not waiting.done()
    assert await held.release() is True
    taken = await waiting
    assert taken is not None
    assert taken.token > held.token
    return taken
