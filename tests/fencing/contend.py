"""Sixteen processes at one guarded account, stale and fresh holders mixed.

The stale ones go on after they have lost the lock: some at once, racing with the next holder,
some when a later holder is known to have entered. What each step did is written down by the
resource itself, in the order in which it happened.

Run as a program: ``contend.py KIND ADDRESS``; prints what was found. With ``careless`` behind it
the late ones write without a look at their fence: the mutant that the test must catch.
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
from typing import Any, Protocol, TypedDict

from fencing.accounts import mysql_settings
from holdfast import Fence, Mode, StaleFence
from holdfast.fencing import file, redis, sql

PROCESSES = 16
HOLDS = 14
LONGEST_SECONDS = 200.0
RESOURCE = "account"


class Step(Protocol):
    """Enters and reads, or enters and writes the value; the resource writes it down."""

    def __call__(self, fence: Fence, value: int | None, *, guarded: bool = True) -> int: ...


class Lock:
    """The lock, as it were: whoever is in has the highest token that was ever given."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), len(Lock.new()))

    @staticmethod
    def new() -> bytes:
        """The last token, the last that entered the account, how many processes are done."""
        return struct.pack("3q", 0, 0, 0)

    def _read(self) -> list[int]:
        return list(struct.unpack("3q", self._map[:]))

    @contextmanager
    def _alone(self) -> Iterator[list[int]]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            numbers = self._read()
            yield numbers
            self._map[:] = struct.pack("3q", *numbers)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextmanager
    def held(self) -> Iterator[Fence]:
        with self._alone() as numbers:
            numbers[0] += 1
            yield Fence("lock", Mode.EXCLUSIVE, (), 0, numbers[0])
            numbers[1] = numbers[0]

    def finish(self) -> None:
        with self._alone() as numbers:
            numbers[2] += 1

    def followed(self, fence: Fence) -> bool:
        """Waits for a later holder to enter; ``False`` if nobody is left who could."""
        ends = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < ends:
            _, entered, done = self._read()
            if entered > fence.token:
                return True
            if done == PROCESSES - 1:
                return False
            time.sleep(0.002)
        raise TimeoutError(f"nobody came after token {fence.token}")


def in_sql(connect: Callable[[], Any]) -> Step:
    connection = connect()
    cursor = connection.cursor()

    def step(fence: Fence, value: int | None, *, guarded: bool = True) -> int:
        try:
            if guarded:
                sql.guard(connection, RESOURCE, fence)
            if value is None:
                cursor.execute("SELECT value FROM account")
                value = int(cursor.fetchone()[0])
                kind = 0
            else:
                cursor.execute(f"UPDATE account SET value = {value}")
                kind = 1
            cursor.execute(f"INSERT INTO log (token, wrote) VALUES ({fence.token}, {kind})")
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

    def step(fence: Fence, value: int | None, *, guarded: bool = True) -> int:
        wanted = "" if value is None else str(value)
        result = json.dumps([fence.token, int(value is not None)])
        keys = [RESOURCE, f"{{{RESOURCE}}}:log"]
        if not guarded:
            answer: Any = client.eval(REDIS_STEP, len(keys), *keys, wanted, result)
            return int(answer)
        return int(redis.guard(client, RESOURCE, fence).run(REDIS_STEP, keys, [wanted, result]))

    return step


def in_file(path: str) -> Step:
    def change(text: str, fence: Fence, value: int | None) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(text)
        if value is not None:
            content["value"] = value
        content["log"].append([fence.token, int(value is not None)])
        return content

    def step(fence: Fence, value: int | None, *, guarded: bool = True) -> int:
        if not guarded:
            aside = Path(f"{path}.{os.getpid()}")
            content = change(Path(path).read_text(), fence, value)
            aside.write_text(json.dumps(content))
            aside.replace(path)
            return int(content["value"])
        with file.guard(path, fence) as ledger:
            content = change(ledger.read_text(), fence, value)
            ledger.write_text(json.dumps(content))
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


class Found(TypedDict):
    """What one process has seen, or all of them."""

    refused: list[list[int]]
    """Whose writes were refused: the token, and the one that stood against it."""
    late: int
    """How many wrote when a later holder was known to have entered."""
    let_in: list[int]
    """Which of these were accepted."""


def work(step: Step, lock: Lock, draw: random.Random, careless: bool) -> Found:
    """Half of the holders work while they hold the lock; the others go on when they have not."""
    found: Found = {"refused": [], "late": 0, "let_in": []}
    for _ in range(HOLDS):
        way = draw.choice(["fresh", "fresh", "racing", "late"])
        with lock.held() as fence:
            value = step(fence, None) + 1
            if way == "fresh":
                step(fence, value)  # may never be refused
                continue
        late = way == "late" and lock.followed(fence)
        found["late"] += late
        try:
            step(fence, value, guarded=not (late and careless))
            if late:
                found["let_in"].append(fence.token)
        except StaleFence as error:
            found["refused"].append([fence.token, error.highest.token if error.highest else 0])
    return found


def child(kind: str, address: str, folder: Path, number: int, careless: bool) -> None:
    lock = Lock(folder / "tokens")
    code = 1
    try:
        found = work(open_step(kind, address), lock, random.Random(number), careless)
        (folder / f"found-{number}").write_text(json.dumps(found))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        lock.finish()
        os._exit(code)


def main() -> None:
    kind, address, *more = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokens").write_bytes(Lock.new())
        children = []
        for number in range(PROCESSES):
            forked = os.fork()
            if forked == 0:
                child(kind, address, folder, number, more == ["careless"])
            children.append(forked)
        failed = sum(os.waitpid(forked, 0)[1] != 0 for forked in children)
        found: list[Found] = [json.loads(path.read_text()) for path in folder.glob("found-*")]
        result = {
            "failed": failed,
            "refused": [pair for one in found for pair in one["refused"]],
            "late": sum(one["late"] for one in found),
            "let_in": [token for one in found for token in one["let_in"]],
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
