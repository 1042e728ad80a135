"""Guards under concurrency: no stale write is accepted, no fresh one refused, no update lost."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
import redis

from fencing import contend
from fencing.accounts import SETUP, mysql_settings
from holdfast.fencing import sql
from servers.mysql import MySQLServer
from servers.postgres import PostgresServer
from servers.redis import RedisServer
from servers.registry import Servers

Log = list[tuple[int, int]]


def prepare_sql(connection: Any) -> Callable[[], tuple[int, Log]]:
    cursor = connection.cursor()
    for text in (*SETUP, "DROP TABLE IF EXISTS log"):
        cursor.execute(text)
    cursor.execute("CREATE TABLE log (place BIGINT, token BIGINT, wrote INTEGER)")
    sql.create(connection)
    connection.commit()

    def outcome() -> tuple[int, Log]:
        cursor.execute("SELECT token, wrote FROM log ORDER BY place")
        log = [(int(token), int(wrote)) for token, wrote in cursor.fetchall()]
        cursor.execute("SELECT value FROM account")
        value = int(cursor.fetchone()[0])
        connection.close()
        return value, log

    return outcome


def prepare_redis(url: str) -> Callable[[], tuple[int, Log]]:
    client = redis.Redis.from_url(url)
    client.flushall()
    client.set(contend.RESOURCE, 0)

    def outcome() -> tuple[int, Log]:
        told: Any = client.lrange(f"{{{contend.RESOURCE}}}:log", 0, -1)
        log = [tuple(json.loads(line)) for line in told]
        value = int(client.get(contend.RESOURCE) or -1)
        client.close()
        return value, log

    return outcome


def prepare_file(path: Path) -> Callable[[], tuple[int, Log]]:
    path.write_text(json.dumps({"value": 0, "log": []}))

    def outcome() -> tuple[int, Log]:
        content = json.loads(path.read_text())
        return content["value"], [tuple(entry) for entry in content["log"]]

    return outcome


def prepare(kind: str, servers: Servers, folder: Path) -> tuple[str, Callable[[], tuple[int, Log]]]:
    if kind == "sqlite":
        address = str(folder / "account.db")
        connection = sqlite3.connect(address)
        connection.execute("PRAGMA journal_mode = WAL")
        return address, prepare_sql(connection)
    if kind == "postgres":
        address = servers.of(PostgresServer).url
        return address, prepare_sql(psycopg.connect(address))
    if kind == "mysql":
        address = servers.of(MySQLServer).url
        return address, prepare_sql(pymysql.connect(**mysql_settings(address)))
    if kind == "redis":
        address = servers.of(RedisServer).url
        return address, prepare_redis(address)
    return str(folder / "account.json"), prepare_file(folder / "account.json")


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql", "redis", "file"])
def test_sixteen_processes(kind: str, servers: Servers, tmp_path: Path) -> None:
    address, outcome = prepare(kind, servers, tmp_path)
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, contend.__file__, kind, address],
        env={**os.environ, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["failed"] == 0, done.stderr
    value, log = outcome()

    highest = 0
    for token, _ in log:
        assert token >= highest, f"{token} was let in after {highest}"
        highest = max(highest, token)
    entered = {token for token, _ in log}
    for token, against in told["refused"]:
        assert token < against, f"{token} was refused although only {against} had entered"
        assert against in entered
    writes = sum(wrote for _, wrote in log)
    assert value == writes, "an update was lost"
    assert writes > contend.PROCESSES * contend.HOLDS / 4
    assert len(told["refused"]) > 20, "nobody was stale: this proves nothing"
