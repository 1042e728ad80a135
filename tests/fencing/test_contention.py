"""Guards under concurrency: no stale write is accepted, no fresh one refused, no update lost."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
import redis

from fencing import contend
from fencing.accounts import SETUP, mysql_settings
from holdfast.fencing import sql
from holdfast.fencing.sql.drivers import driver_of
from servers.mysql import MySQLServer
from servers.postgres import PostgresServer
from servers.redis import RedisServer
from servers.registry import Servers

pytestmark = pytest.mark.faults

Log = list[tuple[int, int]]
KINDS = ["sqlite", "postgres", "mysql", "redis", "file"]


# Numbers that the database gives while the guard's row is locked: in the order of the steps.
PLACES = {
    "sqlite": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "postgresql": "BIGSERIAL PRIMARY KEY",
    "mysql": "BIGINT PRIMARY KEY AUTO_INCREMENT",
}


def prepare_sql(connection: Any) -> Callable[[], tuple[int, Log]]:
    cursor = connection.cursor()
    for text in (*SETUP, "DROP TABLE IF EXISTS log"):
        cursor.execute(text)
    place = PLACES[driver_of(connection).dialect]
    cursor.execute(f"CREATE TABLE log (place {place}, token BIGINT, wrote INTEGER)")
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
        answer: Any = client.lrange(f"{{{contend.RESOURCE}}}:log", 0, -1)
        log = [tuple(json.loads(line)) for line in answer]
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


def contended(address: str, *words: str) -> Any:
    """What the sixteen have seen."""
    done = subprocess.run(
        [sys.executable, contend.__file__, words[0], address, *words[1:]],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["failed"] == 0, done.stderr
    return answer


def complaints(answer: Any, value: int, log: Log) -> Iterator[str]:
    """Everything that may not have happened."""
    highest = 0
    for token, _ in log:
        if token < highest:
            yield f"{token} was let in after {highest}"
        highest = max(highest, token)
    entered = {token for token, _ in log}
    for token, against in answer["refused"]:
        if token >= against or against not in entered:
            yield f"{token} was refused although {against} had not entered after it"
    for token in answer["let_in"]:
        yield f"{token} was let in although a later holder had entered"
    writes = sum(wrote for _, wrote in log)
    if value != writes:
        yield f"{writes} deposits were accepted, and {value} are there"


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_processes(kind: str, servers: Servers, tmp_path: Path) -> None:
    address, outcome = prepare(kind, servers, tmp_path)
    answer = contended(address, kind)
    value, log = outcome()
    assert not list(complaints(answer, value, log))
    assert sum(wrote for _, wrote in log) > contend.PROCESSES * contend.HOLDS / 4
    assert answer["late"] > contend.PROCESSES, "nobody was stale: this proves nothing"
    assert len(answer["refused"]) >= answer["late"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_careless_writer_is_caught(kind: str, servers: Servers, tmp_path: Path) -> None:
    """The mutant: who has entered to read writes later without a look at the fence."""
    address, outcome = prepare(kind, servers, tmp_path)
    answer = contended(address, kind, "careless")
    assert len(answer["let_in"]) == answer["late"] > 0
    found = list(complaints(answer, *outcome()))
    assert any("was let in after" in complaint for complaint in found)
    assert any("deposits were accepted" in complaint for complaint in found)
