"""What the tests of the MySQL store share: a server, an administrator, accounts, backends.

Fixtures are taken over by name: ``server, admin = mysql_bench.server, mysql_bench.admin``.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pymysql
import pytest

from holdfast.claim import Claim, Grant
from holdfast.core.contract import Backend, Settings
from holdfast.core.drive import run_now
from holdfast.runtimes.blocking import BlockingRuntime
from holdfast.url import open_store
from servers.mysql import MySQLServer
from servers.registry import Servers

Admin = Any


@pytest.fixture
def server(servers: Servers) -> MySQLServer:
    """The server that most tests use together, each in a namespace of its own."""
    return servers.of(MySQLServer)


@pytest.fixture
def admin(server: MySQLServer) -> Iterator[Admin]:
    with open_admin(server) as connection:
        yield connection


def open_admin(server: MySQLServer) -> Admin:
    """Over the socket, as the one who may do everything."""
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


def account(server: MySQLServer, admin: Admin, rights: str = "", on: str = "") -> str:
    """A URL with an account of its own: its connections can be told from all others."""
    name = f"u{secrets.token_hex(4)}"
    rows(admin, f"CREATE USER '{name}'@'%' IDENTIFIED BY 'secret'")
    rows(admin, f"GRANT {rights or 'ALL'} ON {on or 'holdfast.*'} TO '{name}'@'%'")
    return server.url.replace("//holdfast:", f"//{name}:")


def sessions(admin: Admin, url: str, like: str = "%") -> list[int]:
    sql = "SELECT id FROM information_schema.processlist WHERE user = %s AND"
    sql += " COALESCE(info, '') LIKE %s"
    return [row[0] for row in rows(admin, sql, urlsplit(url).username, like)]


def wait_for(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come")


def backend_of(url: str, namespace: str) -> Backend:
    return open_store(url, Settings(namespace=namespace)).backend(BlockingRuntime())


def taken(backend: Backend, asked: Claim) -> Grant:
    answer = run_now(backend.attempt(asked, join=True))
    assert isinstance(answer, Grant)
    return answer
