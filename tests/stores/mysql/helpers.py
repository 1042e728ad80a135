"""Helpers for the tests of both MySQL stores: a server, an administrator, accounts, backends.

A test module imports the fixtures by name: ``server, admin = helpers.server, helpers.admin``.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import pymysql
import pytest

from holdfast.claim import Busy, Claim, Grant
from holdfast.core.contract import Backend, Settings
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.io.runtime_aio import AsyncioRuntime
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.mysql.protocol import quoted
from holdfast.stores.mysql.wakeups import SleepSubscription
from holdfast.testing import Flavour
from holdfast.url import open_store
from servers.mysql import MySQLServer
from servers.registry import Servers
from stores.claims import claim_of

Admin = Any
T = TypeVar("T")


@pytest.fixture
def server(servers: Servers) -> MySQLServer:
    """The server that most tests share, each with a namespace of its own."""
    return servers.of(MySQLServer)


@pytest.fixture
def admin(server: MySQLServer) -> Iterator[Admin]:
    with open_admin(server) as connection:
        yield connection


def open_admin(server: MySQLServer) -> Admin:
    """A connection of the administrator, over the UNIX socket."""
    return pymysql.connect(
        unix_socket=str(server.folder / "mysql.sock"),
        user="root",
        database="holdfast",
        autocommit=True,
        client_flag=pymysql.constants.CLIENT.MULTI_STATEMENTS,
    )


def rows(admin: Admin, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
    with admin.cursor() as cursor:
        cursor.execute(sql, parameters or None)
        found = list(cursor.fetchall())
        while cursor.nextset():
            pass
        return found


def one(admin: Admin, sql: str) -> Any:
    """Returns the first value of the first row, or None."""
    found = rows(admin, sql)
    return found[0][0] if found else None


def key(namespace: str, name: str = "name", part: str = "") -> str:
    """Returns the named lock of a name in advisory mode; ``part`` is its suffix."""
    digest = hashlib.sha256(f"{namespace}\0{name}".encode()).hexdigest()
    return f"hf:{digest[:48]}{part}"


def account(server: MySQLServer, admin: Admin, rights: str = "", on: str = "") -> str:
    """Creates an account and returns its URL, so that its connections can be found."""
    name = f"u{secrets.token_hex(4)}"
    rows(admin, f"CREATE USER '{name}'@'%' IDENTIFIED BY 'secret'")
    rows(admin, f"GRANT {rights or 'ALL'} ON {on or 'holdfast.*'} TO '{name}'@'%'")
    return server.url.replace("//holdfast:", f"//{name}:")


def sessions(admin: Admin, url: str, like: str = "%") -> list[int]:
    sql = "SELECT id FROM information_schema.processlist WHERE user = %s AND"
    sql += " COALESCE(info, '') LIKE %s"
    return [row[0] for row in rows(admin, sql, urlsplit(url).username, like)]


def asleep(admin: Admin, url: str, names: Iterable[str]) -> int:
    """Returns the query id with which a session of an account sleeps for all these names; 0 if
    there is none."""
    sql = "SELECT query_id, info FROM information_schema.processlist WHERE user = %s"
    sleeping = rows(admin, f"{sql} AND state = 'User lock'", urlsplit(url).username)
    wanted = [quoted(name.encode()).decode() for name in names]
    return next((n for n, info in sleeping if all(name in info for name in wanted)), 0)


def wait_for(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the condition did not become true")


def backend_of(url: str, namespace: str) -> Backend:
    return open_store(url, Settings(namespace=namespace)).backend(BlockingRuntime())


def taken(backend: Backend, asked: Claim) -> Grant:
    answer = run_now(backend.attempt(asked, join=True))
    assert isinstance(answer, Grant)
    return answer


class Peer:
    """A backend, blocking or asyncio, driven from the test's own thread."""

    def __init__(self, url: str, namespace: str, flavour: Flavour) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        if flavour is Flavour.ASYNCIO:
            self._thread.start()
            wait_for(lambda: self._loop)
        runtime = BlockingRuntime() if self._loop is None else AsyncioRuntime()
        self.backend = open_store(url, Settings(namespace=namespace)).backend(runtime)
        self.wakeups: Any = getattr(self.backend, "wakeups", None)

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._loop.run_forever()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts work in a thread or task of its own."""
        if self._loop is not None:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(run_now(work))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.begin(work).result(60)

    def take(self, name: str = "name") -> Grant:
        """Acquires with a ttl that needs no renewal during a test."""
        grant = self.do(self.backend.attempt(claim_of(name, ttl=600.0), join=True))
        assert isinstance(grant, Grant)
        return grant

    def enter_queue(self, asked: Claim) -> Busy:
        """Joins the queue, with the subscription that the first wait opens."""
        busy = self.do(self.backend.attempt(asked, join=True))
        assert isinstance(busy, Busy)
        if not self.wakeups.subscription:
            self.do(self.backend.wait(asked, busy, now() + 60))
            return self.enter_queue(asked)
        return busy

    def wait(self, asked: Claim, busy: Busy) -> Future[Any]:
        """Begins a wait that is longer than any test."""
        return self.begin(self.backend.wait(asked, busy, now() + 600))

    @property
    def subscription(self) -> SleepSubscription:
        """The current subscription."""
        return cast("SleepSubscription", self.wakeups._subscription)

    def close(self) -> None:
        self.do(self.backend.close())
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)


@contextmanager
def peers(namespace: str, flavour: Flavour, *urls: str) -> Iterator[list[Peer]]:
    """Opens backends, and closes them at the end."""
    made = [Peer(url, namespace, flavour) for url in urls]
    try:
        yield made
    finally:
        for peer in made:
            peer.close()
