"""The guards, each with an account behind it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
import redis.asyncio

from fencing import accounts
from fencing.accounts import Account, mysql_settings
from fencing.databases import Connect
from holdfast.fencing.sql import table as sql_table
from servers.mysql import MySQLServer
from servers.postgres import PostgresServer
from servers.redis import RedisServer
from servers.registry import Servers

Make = Callable[[Servers, Path], Account]


def _postgres(servers: Servers) -> str:
    return servers.of(PostgresServer).url


def _mysql(servers: Servers) -> str:
    return servers.of(MySQLServer).url


def _redis(servers: Servers) -> str:
    return servers.of(RedisServer).url


def _driver(url: str, driver: str) -> str:
    scheme, rest = url.split("://")
    return f"{scheme}+{driver}://{rest}"


GUARDS: dict[str, Make] = {
    "sqlite3": lambda servers, folder: accounts.sqlite_account(folder / "account.db"),
    "psycopg": lambda servers, folder: accounts.Blocking(
        lambda: accounts.postgres_connection(_postgres(servers))
    ),
    "psycopg-async": lambda servers, folder: accounts.async_postgres_account(_postgres(servers)),
    "pymysql": lambda servers, folder: accounts.Blocking(
        lambda: accounts.mysql_connection(_mysql(servers))
    ),
    "asyncmy": lambda servers, folder: accounts.asyncmy_account(_mysql(servers)),
    "sqlalchemy-sqlite": lambda servers, folder: accounts.Core(f"sqlite:///{folder}/a.db"),
    "sqlalchemy-psycopg": lambda servers, folder: accounts.Core(
        _driver(_postgres(servers), "psycopg")
    ),
    "sqlalchemy-session": lambda servers, folder: accounts.Core(
        _driver(_postgres(servers), "psycopg"), session=True
    ),
    "sqlalchemy-pymysql": lambda servers, folder: accounts.Core(
        _driver(_mysql(servers), "pymysql")
    ),
    "sqlalchemy-async": lambda servers, folder: accounts.AsyncCore(
        _driver(_postgres(servers), "psycopg")
    ),
    "sqlalchemy-async-session": lambda servers, folder: accounts.AsyncCore(
        _driver(_mysql(servers), "asyncmy"), session=True
    ),
    "redis": lambda servers, folder: accounts.Redis(redis.Redis.from_url(_redis(servers))),
    "redis-async": lambda servers, folder: accounts.AsyncRedis(
        lambda: redis.asyncio.Redis.from_url(_redis(servers), decode_responses=True)
    ),
    "file": lambda servers, folder: accounts.InFile(folder / "account"),
    "http": lambda servers, folder: accounts.OverHttp(f"memory://{folder.name}"),
    "http-asgi": lambda servers, folder: accounts.OverAsgi(f"memory://{folder.name}-asgi"),
}


@pytest.fixture(autouse=True)
def no_table_is_known() -> None:
    """Tests drop the table behind the guard's back: the next one must look for itself."""
    sql_table._present.clear()


@pytest.fixture(params=list(GUARDS))
def account(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> Iterator[Account]:
    made = GUARDS[request.param](servers, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def connect(
    request: pytest.FixtureRequest, servers: Servers, tmp_path: Path
) -> Iterator[Callable[[], Any]]:
    """Opens connections to one database without a table of fences."""
    opened: list[Any] = []
    kinds: dict[str, Connect] = {
        "sqlite": lambda: sqlite3.connect(tmp_path / "a.db", timeout=30, check_same_thread=False),
        "postgresql": lambda: psycopg.connect(
            servers.of(PostgresServer).url, options="-c lock_timeout=20s"
        ),
        "mysql": lambda: pymysql.connect(**mysql_settings(servers.of(MySQLServer).url)),
    }

    def open_one() -> Any:
        opened.append(kinds[request.param]())
        return opened[-1]

    first = open_one()
    first.cursor().execute("DROP TABLE IF EXISTS holdfast_fence")
    first.commit()
    yield open_one
    for connection in opened:
        connection.close()
