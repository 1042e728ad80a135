"""Sixteen processes at one guarded account, stale and fresh holders mixed.

The stale ones go on after they have lost the lock. What each step did is written down by the
resource itself, in the order in which it happened.

Run as a program: ``contend.py KIND ADDRESS``; prints what was found.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import random
import sqlite3
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fencing.accounts import mysql_settings
from holdfast import Fence, Mode, StaleFence
from holdfast.fencing import file, redis, sql

PROCESSES = 16
HOLDS = 14
RESOURCE = "account"
Step = Callable[[Fence, int | None], int]
"""Enters and reads, or enters and writes the value; the resource writes it down."""


class Lock:
    """The lock, as it were: whoever is in has the highest token that was ever given."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), 8)

    @contextmanager
    def held(self) -> Iterator[Fence]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            (token,) = struct.unpack("q", self._map[:8])
            self._map[:8] = struct.pack("q", token + 1)
            yield Fence("lock", Mode.EXCLUSIVE, (), 0, token + 1)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def in_sql(connect: Callable[[], Any]) -> Step:
    connection = connect()
    cursor = connection.cursor()

    def step(fence: Fence, value: int | None) -> int:
        try:
            sql.guard(connection, RESOURCE, fence)
            if value is None:
                cursor.execute("SELECT value FROM account")
                value = int(cursor.fetchone()[0])
                kind = 0
            else:
                cursor.execute(f"UPDATE account SET value = {value}")
                kind = 1
            cursor.execute(
                "INSERT INTO log (place, token, wrote) SELECT COALESCE(MAX(place), 0) + 1, "
                f"{fence.token}, {kind} FROM log"
            )
        except BaseException:
            connection.rollback()
            raise
        connection.commit()
        return value

    return step


REDIS_STEP = """
if ARGV[1] ~= '' then redis.call('SET', KEYS[1], ARGV[1]) end
redis.call('RPUSH', KEYS[2], ARGV[2])
return redis.call('GET', KEYS[1])
"""


def in_redis(url: str) -> Step:
    from redis import Redis

    client = Redis.from_url(url)

    def step(fence: Fence, value: int | None) -> int:
        wanted = "" if value is None else str(value)
        told = json.dumps([fence.token, int(value is not None)])
        keys = [RESOURCE, f"{{{RESOURCE}}}:log"]
        return int(redis.guard(client, RESOURCE, fence).run(REDIS_STEP, keys, [wanted, told]))

    return step


def in_file(path: str) -> Step:
    def step(fence: Fence, value: int | None) -> int:
        with file.guard(path, fence) as guarded:
            content = json.loads(guarded.read_text())
            if value is not None:
                content["value"] = value
            content["log"].append([fence.token, int(value is not None)])
            guarded.write_text(json.dumps(content))
            return int(content["value"])

    return step


def open_step(kind: str, address: str) -> Step:
    if kind == "sqlite":
        return in_sql(lambda: sqlite3.connect(address, timeout=30))
    if kind == "postgres":
        import psycopg

        return in_sql(lambda: psycopg.connect(address))
    if kind == "mysql":
        import pymysql

        return in_sql(lambda: pymysql.connect(**mysql_settings(address)))
    return in_redis(address) if kind == "redis" else in_file(address)


def work(step: Step, lock: Lock, draw: random.Random) -> list[list[int]]:
    """Half of the holders work while they hold the lock, the others go on when they have lost it.
    What was refused of the latter: the token, and what stood against it."""
    refused: list[list[int]] = []
    for _ in range(HOLDS):
        with lock.held() as fence:
            value = step(fence, None) + 1
            if draw.random() < 0.5:
                step(fence, value)  # may never be refused
                continue
        time.sleep(draw.choice([0, 0.01, 0.05]))
        try:
            step(fence, value)
        except StaleFence as error:
            refused.append([fence.token, error.highest.token if error.highest else 0])
    return refused


def child(kind: str, address: str, folder: Path, number: int) -> None:
    try:
        found = work(open_step(kind, address), Lock(folder / "tokens"), random.Random(number))
        (folder / f"refused-{number}").write_text(json.dumps(found))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    kind, address = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokens").write_bytes(struct.pack("q", 0))
        children = []
        for number in range(PROCESSES):
            forked = os.fork()
            if forked == 0:
                child(kind, address, folder, number)
            children.append(forked)
        failed = sum(os.waitpid(forked, 0)[1] != 0 for forked in children)
        found = [json.loads(path.read_text()) for path in folder.glob("refused-*")]
        refused = [pair for pairs in found for pair in pairs]
        print(json.dumps({"failed": failed, "refused": refused}))


if __name__ == "__main__":
    main()
