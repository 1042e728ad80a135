"""Libraries whose private parts we use: each is named, is there, and has a version cap.

Where one of these fails after an upgrade, read what the library does now in its place, and mend the
module that is named before the cap in pyproject.toml is raised.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pymysql.connections
import pytest
import redis
import redis.asyncio
from kazoo.client import KazooClient
from kazoo.protocol.connection import ConnectionHandler

import holdfast

STORES = Path(holdfast.__file__).parent / "stores"
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]

PYMYSQL = {"_sock"}
REDIS = {"_sock"}
REDIS_ASYNCIO = {"_connect", "_reader", "_writer"}
KAZOO_CLIENT = {
    *("_call", "_conn_retry", "_connection", "_pending", "_queue", "_session_callback"),
    *("_session_id", "_session_timeout", "_state", "_stopped"),
}
KAZOO_CONNECTION = {
    *("_connect", "_invoke", "_read_response", "_read_sock", "_read_socket"),
    *("_read_watch_event", "_send_ping"),
    *("_send_request", "_socket", "_socket_error_handling", "_submit", "_write_sock", "_xid"),
}


def missing(thing: object, names: set[str]) -> list[str]:
    return sorted(name for name in names if not hasattr(thing, name))


def used(*files: str) -> set[str]:
    """What modules use of objects that are a library's, by the names we give those."""
    texts = [path.read_text() for pattern in files for path in sorted(STORES.glob(pattern))]
    assert texts
    found = [
        re.findall(r"(?:\bclient|\bconnection|super\(\))\.(_[a-z]\w*)", text) for text in texts
    ]
    return {name for names in found for name in names}


def test_pymysql() -> None:
    """Its handshake is used, then its socket is ours."""
    client = pymysql.connections.Connection(defer_connect=True)
    assert not missing(client, PYMYSQL), "PyMySQL has changed: see stores/mysql/connection.py"
    assert used("mysql/connection.py") <= PYMYSQL


@pytest.mark.parametrize(
    "kind", [redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection]
)
def test_redis_py(kind: Any) -> None:
    """Its login is used, then its socket is ours."""
    assert not missing(kind(), REDIS), "redis-py has changed: see stores/redis/blocking.py"
    assert used("redis/blocking.py", "redlock/broadcast_blocking.py") <= REDIS


@pytest.mark.parametrize("kind", ["Connection", "SSLConnection", "UnixDomainSocketConnection"])
def test_redis_py_for_asyncio(kind: str) -> None:
    """The same, with its streams."""
    connection = getattr(redis.asyncio, kind)()
    assert not missing(connection, REDIS_ASYNCIO), "redis-py has changed: see stores/redis/aio.py"
    assert inspect.iscoroutinefunction(connection._connect)
    assert used("redis/aio.py", "redlock/broadcast_aio.py") <= REDIS_ASYNCIO


def test_kazoo() -> None:
    """Its session is used, with our own sending and reading in place of its own: what we override
    must be there to be overridden."""
    client = KazooClient()
    assert not missing(client, KAZOO_CLIENT), (
        "kazoo has changed: see stores/zookeeper/client/connection.py"
    )
    answer = "kazoo has changed: see stores/zookeeper/client/connection.py"
    assert not missing(client._connection, KAZOO_CONNECTION), answer
    assert isinstance(client._connection, ConnectionHandler)
    assert used("zookeeper/session.py", "zookeeper/client/*.py") <= KAZOO_CLIENT | KAZOO_CONNECTION


@pytest.mark.parametrize(
    ("extra", "package"), [("mysql", "PyMySQL"), ("redis", "redis"), ("zookeeper", "kazoo")]
)
def test_versions_are_capped(extra: str, package: str) -> None:
    """A new major version may change what is private without a word."""
    [wanted] = [line for line in EXTRAS[extra] if re.match(rf"{package}\b", line)]
    assert re.search(r"<\d+$", wanted), wanted
