"""One account under every guard: a number that holders read in one step and write in a later one.

Each step is a guarded transaction (or block, or script) of its own, as it is when a holder pauses
between them. ``peek`` and ``poke`` go round the guard: they are what write-only fencing reads
with, and how tests look at the outcome.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

import holdfast
from holdfast import Fence, Mode
from holdfast.fencing import file, http, redis, sql

RESOURCE = "account:7"
READ = "SELECT value FROM account"
WRITE = "UPDATE account SET value = {}"
SETUP = (
    "DROP TABLE IF EXISTS account",
    "CREATE TABLE account (value INTEGER NOT NULL)",
    "INSERT INTO account VALUES (0)",
    "DROP TABLE IF EXISTS holdfast_fence",
)


class Account:
    """What every guarded account can do."""

    def read(self, fence: Fence) -> int:
        """Enters and reads."""
        raise NotImplementedError

    def write(self, fence: Fence, value: int) -> None:
        """Enters and writes."""
        raise NotImplementedError

    def peek(self) -> int:
        """Reads without the guard."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends connections."""


class Blocking(Account):
    """An account in SQL, over a blocking connection."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.connection = connect()
        for text in SETUP:
            self.execute(text)
        self.connection.commit()
        sql.create(self.connection)
        self.connection.commit()

    def execute(self, text: str) -> Any:
        cursor = self.connection.cursor()
        cursor.execute(text)
        return cursor

    def read(self, fence: Fence) -> int:
        return int(self._step(lambda: sql.guard(self.connection, RESOURCE, fence), READ))

    def write(self, fence: Fence, value: int) -> None:
        self._step(lambda: sql.guard(self.connection, RESOURCE, fence), WRITE.format(value))

    def peek(self) -> int:
        return int(self._step(lambda: None, READ))

    def _step(self, enter: Callable[[], object], text: str) -> Any:
        try:
            enter()
            done = self.execute(text)
            value = done.fetchone()[0] if text == READ else None
        except BaseException:
            self.connection.rollback()
            raise
        self.connection.commit()
        return value

    def close(self) -> None:
        self.connection.close()


class Core(Blocking):
    """The same through SQLAlchemy: ``Connection`` or ``Session``."""

    def __init__(self, url: str, *, session: bool = False, setup: bool = True) -> None:
        import sqlalchemy
        from sqlalchemy.orm import Session

        self.engine = sqlalchemy.create_engine(url)
        super().__init__(lambda: Session(self.engine) if session else self.engine.connect())

    def execute(self, text: str) -> Any:
        import sqlalchemy

        return self.connection.execute(sqlalchemy.text(text))

    def close(self) -> None:
        super().close()
        self.engine.dispose()


class Asynchronous(Account):
    """An account in SQL, over a connection of asyncio; each step runs on one loop of its own."""

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.runner = asyncio.Runner()
        self.connection = self.run(connect())
        self.run(self._setup())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    async def _setup(self) -> None:
        for text in SETUP:
            await self.execute(text)
        await self.connection.commit()
        await sql.create(self.connection)
        await self.connection.commit()

    async def execute(self, text: str) -> Any:
        cursor = self.connection.cursor()
        await cursor.execute(text)
        row = await cursor.fetchone() if text == READ else None
        await cursor.close()
        return row

    def read(self, fence: Fence) -> int:
        return int(self.run(self._step(fence, READ)))

    def write(self, fence: Fence, value: int) -> None:
        self.run(self._step(fence, WRITE.format(value)))

    def peek(self) -> int:
        return int(self.run(self._step(None, READ)))

    async def _step(self, fence: Fence | None, text: str) -> Any:
        try:
            if fence is not None:
                await sql.guard(self.connection, RESOURCE, fence)
            row = await self.execute(text)
        except BaseException:
            await self.connection.rollback()
            raise
        await self.connection.commit()
        return row[0] if row else None

    def close(self) -> None:
        self.run(self._close())
        self.runner.close()

    async def _close(self) -> None:
        closed = self.connection.close()
        if closed is not None:
            await closed


class AsyncCore(Asynchronous):
    """The same through SQLAlchemy: ``AsyncConnection`` or ``AsyncSession``."""

    def __init__(self, url: str, *, session: bool = False) -> None:
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

        self.engine = create_async_engine(url)

        async def connect() -> Any:
            if session:
                return AsyncSession(self.engine)
            return await self.engine.connect()

        super().__init__(connect)

    async def execute(self, text: str) -> Any:
        import sqlalchemy

        result = await self.connection.execute(sqlalchemy.text(text))
        return result.fetchone() if text == READ else None

    async def _close(self) -> None:
        await super()._close()
        await self.engine.dispose()


def sqlite_account(path: Path) -> Account:
    return Blocking(lambda: sqlite3.connect(path))


def postgres_connection(url: str) -> Any:
    import psycopg

    return psycopg.connect(url)


def mysql_connection(url: str) -> Any:
    import pymysql

    return pymysql.connect(**mysql_settings(url))


def mysql_settings(url: str) -> dict[str, Any]:
    """A ``mysql://`` URL as the drivers take it."""
    parts = urlsplit(url)
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username,
        "password": parts.password,
        "database": parts.path.strip("/"),
    }


def asyncmy_account(url: str) -> Account:
    async def connect() -> Any:
        import asyncmy

        settings = mysql_settings(url)
        return await asyncmy.connect(db=settings.pop("database"), **settings)

    return Asynchronous(connect)


def async_postgres_account(url: str) -> Account:
    async def connect() -> Any:
        import psycopg

        return await psycopg.AsyncConnection.connect(url)

    return Asynchronous(connect)


class Redis(Account):
    """An account that is a key of Redis."""

    def __init__(self, client: Any) -> None:
        self.client = client
        client.flushall()
        client.set(RESOURCE, 0)

    def read(self, fence: Fence) -> int:
        return int(redis.guard(self.client, RESOURCE, fence).get())

    def write(self, fence: Fence, value: int) -> None:
        redis.guard(self.client, RESOURCE, fence).set(value)

    def peek(self) -> int:
        return int(self.client.get(RESOURCE))

    def close(self) -> None:
        self.client.close()


class AsyncRedis(Account):
    """The same over ``redis.asyncio``."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.runner = asyncio.Runner()

        async def setup() -> Any:
            client = connect()
            await client.flushall()
            await client.set(RESOURCE, 0)
            return client

        self.client = self.runner.run(setup())

    def read(self, fence: Fence) -> int:
        return int(self.runner.run(redis.guard(self.client, RESOURCE, fence).get()))

    def write(self, fence: Fence, value: int) -> None:
        self.runner.run(redis.guard(self.client, RESOURCE, fence).set(value))

    def peek(self) -> int:
        async def get() -> Any:
            return await self.client.get(RESOURCE)

        return int(self.runner.run(get()))

    def close(self) -> None:
        self.runner.run(self.client.aclose())
        self.runner.close()


class InFile(Account):
    """An account that is a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("0")

    def read(self, fence: Fence) -> int:
        with file.guard(self.path, fence, timeout=20) as guarded:
            return int(guarded.read_text())

    def write(self, fence: Fence, value: int) -> None:
        with file.guard(self.path, fence, timeout=20) as guarded:
            if fence.mode is not Mode.SHARED:
                guarded.write_text(str(value))
        if fence.mode is Mode.SHARED:  # tests of the rule let readers write, too
            self.path.write_text(str(value))

    def peek(self) -> int:
        return int(self.path.read_text())


class OverHttp(Account):
    """An account behind a WSGI application without a transaction: a gate guards it."""

    def __init__(self, url: str) -> None:
        self.value = 0
        self.locks = holdfast.connect(url)
        app = http.WsgiFence(
            self.serve, resource=lambda environ: RESOURCE, gate=http.Gate(self.locks)
        )
        self.client = httpx.Client(transport=httpx.WSGITransport(app), base_url="http://account")

    def serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        if environ["REQUEST_METHOD"] == "PUT":
            self.value = int(environ["wsgi.input"].read())
        start_response("200 OK", [])
        return [str(self.value).encode()]

    def read(self, fence: Fence) -> int:
        return int(self.send("GET", fence))

    def write(self, fence: Fence, value: int) -> None:
        self.send("PUT", fence, str(value))

    def peek(self) -> int:
        return self.value

    def send(self, method: str, fence: Fence, content: str = "") -> str:
        headers = http.headers(fence)
        answer = self.client.request(method, "/", headers=headers, content=content)
        return http.raise_for_stale(answer).raise_for_status().text

    def close(self) -> None:
        self.client.close()
        self.locks.close()


class OverAsgi(Account):
    """The same behind an ASGI application."""

    def __init__(self, url: str) -> None:
        self.value = 0
        self.runner = asyncio.Runner()

        async def setup() -> None:
            self.locks = holdfast.connect_async(url)
            app = http.AsgiFence(
                self.serve, resource=lambda scope: RESOURCE, gate=http.Gate(self.locks)
            )
            transport = httpx.ASGITransport(app)
            self.client = httpx.AsyncClient(transport=transport, base_url="http://account")

        self.runner.run(setup())

    async def serve(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "PUT":
            self.value = int((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(self.value).encode()})

    def read(self, fence: Fence) -> int:
        return int(self.runner.run(self.send("GET", fence)))

    def write(self, fence: Fence, value: int) -> None:
        self.runner.run(self.send("PUT", fence, str(value)))

    def peek(self) -> int:
        return self.value

    async def send(self, method: str, fence: Fence, content: str = "") -> str:
        answer = await self.client.request(method, "/", auth=http.carry(fence), content=content)
        return http.raise_for_stale(answer).raise_for_status().text

    def close(self) -> None:
        async def end() -> None:
            await self.client.aclose()
            await self.locks.close()

        self.runner.run(end())
        self.runner.close()
