"""One machine: Holdfast's embedded store, lock files by others, and what bounds them."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable
from typing import Any

from benchmarks.contenders.common import ALL, WAITS, nothing, polling
from holdfast.bench.contender import DRAIN, Client, Contender, Flavour, Opener, Pair, Target, ours

__all__ = ["CONTENDERS"]

POLL_SECONDS = 0.001
PATIENCE = 3600


def _path(target: Target, name: str) -> str:
    return f"{target.url.removeprefix('sqlite://')}.{name.replace(':', '-')}"


def _upsert(target: Target) -> Client:
    """A bare prebuilt upsert and release, in the journal and synchronous mode of the store."""

    def lock(name: str) -> Pair:
        connection = sqlite3.connect(
            _path(target, "limit"), isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA busy_timeout=10000")
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS lock (name TEXT PRIMARY KEY, token INTEGER, owner TEXT,"
            " ends REAL) WITHOUT ROWID"
        )
        me, execute = str(os.getpid()), connection.execute
        take = (
            "INSERT INTO lock VALUES (?1, 1, ?2, ?3) ON CONFLICT (name) DO UPDATE SET"
            " token = token + 1, owner = ?2, ends = ?3 WHERE ends <= ?4 RETURNING token"
        )
        free = "UPDATE lock SET owner = '', ends = 0 WHERE name = ?1 AND owner = ?2"
        taking, freeing = (name, me, 2.0, 1.0), (name, me)

        def attempt() -> Any:
            row = execute(take, taking).fetchone()
            return row and row[0]

        return Pair(polling(attempt, POLL_SECONDS), lambda: execute(free, freeing))

    return Client(lock, nothing)


def _flock(target: Target) -> Client:
    def lock(name: str) -> Pair:
        file = os.open(_path(target, name), os.O_RDWR | os.O_CREAT)
        flock, take, free = fcntl.flock, fcntl.LOCK_EX, fcntl.LOCK_UN
        return Pair(lambda: flock(file, take), lambda: flock(file, free))

    return Client(lock, nothing)


def _made(make: Callable[[str], Any]) -> Opener:
    """A peer whose lock is made of a path."""

    def opened(target: Target) -> Client:
        def lock(name: str) -> Pair:
            made = make(_path(target, name))
            return Pair(made.acquire, made.release)

        return Client(lock, nothing)

    return opened


def _filelock(path: str) -> Any:
    import filelock

    return filelock.FileLock(path)


def _soft_lease(path: str) -> Any:
    import filelock

    return filelock.SoftFileLease(f"{path}.lease")


class _ReadWrite:
    def __init__(self, path: str) -> None:
        import filelock

        made = filelock.ReadWriteLock(f"{path}.rw.db", is_singleton=False)
        self.acquire, self.release = made.acquire_write, made.release


def _fasteners(path: str) -> Any:
    import fasteners

    return fasteners.InterProcessLock(path)


def _portalocker(path: str) -> Any:
    import portalocker

    return portalocker.Lock(path, timeout=PATIENCE)


def _sherlock(path: str) -> Any:
    import pathlib

    import sherlock

    file = pathlib.Path(path)
    return sherlock.FileLock(
        file.name, client=file.parent / "sherlock", expire=30, timeout=PATIENCE
    )


async def _filelock_async(target: Target) -> Client:
    import filelock

    def lock(name: str) -> Pair:
        made = filelock.AsyncFileLock(_path(target, name))
        return Pair(made.acquire, made.release)

    async def close() -> None:
        pass

    return Client(lock, close)


def _tooz(target: Target) -> Client:
    from tooz import coordination

    coordinator = coordination.get_coordinator(f"file://{_path(target, 'tooz')}", b"benchmark")
    coordinator.start()

    def lock(name: str) -> Pair:
        made = coordinator.get_lock(name.encode())
        return Pair(made.acquire, made.release)

    return Client(lock, coordinator.stop)


def _peer(name: str, open_: Opener, cases: frozenset[str] = WAITS) -> Contender:
    flavour: Flavour = "asyncio" if "asyncio" in name else "blocking"
    return Contender(name, "sqlite", "peer", flavour, open_, cases)


CONTENDERS = [
    Contender("bare upsert, polled every ms", "sqlite", "limit", "blocking", _upsert, WAITS),
    Contender("bare flock", "sqlite", "least", "blocking", _flock, WAITS),
    *ours("sqlite"),
    _peer("fasteners", _made(_fasteners)),
    _peer("portalocker", _made(_portalocker)),
    _peer("filelock", _made(_filelock), ALL),
    _peer("filelock SoftFileLease", _made(_soft_lease)),
    _peer("filelock ReadWriteLock", _made(_ReadWrite)),
    _peer("filelock asyncio", _filelock_async, frozenset({*WAITS, DRAIN})),
    _peer("sherlock file", _made(_sherlock)),
    _peer("tooz file", _tooz),
]
