"""Who is measured: each gives a function that takes and releases one lock once.

A *limit* sends exactly the requests that a fenced lock needs, prebuilt, over a bare socket or
connection. It keeps no state of its own, renews nothing and knows no waiters.
"""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

import holdfast

__all__ = ["CONTENDERS", "Contender"]

Hold = Callable[[], None]


class Contender(NamedTuple):
    """One row of a table."""

    name: str
    store: str
    limit: bool
    open: Callable[[str], Hold]


def _holdfast(url: str) -> Hold:
    lock = holdfast.connect(url).lock("benchmark")

    def hold() -> None:
        with lock:
            pass

    return hold


def _sqlite_limit(url: str) -> Hold:
    """A bare prebuilt upsert and release, in the journal and synchronous mode of the store."""
    file = url.removeprefix("sqlite://") + ".limit"
    connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=0"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS lock (name TEXT PRIMARY KEY, token INTEGER, owner TEXT,"
        " ends REAL) WITHOUT ROWID"
    )
    take = (
        "INSERT INTO lock VALUES (?1, ?2, ?3, ?4) ON CONFLICT (name) DO UPDATE SET"
        " token = max(token + 1, ?2), owner = ?3, ends = ?4 WHERE ends <= ?5 RETURNING token"
    )
    free = "UPDATE lock SET owner = '', ends = 0 WHERE name = ?1 AND owner = ?2"
    execute = connection.execute
    taking, freeing = ("benchmark", 1, "owner", 2.0, 1.0), ("benchmark", "owner")

    def hold() -> None:
        execute(take, taking).fetchone()
        execute(free, freeing)

    return hold


_TAKE = """
local t = redis.call('TIME')
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local token = math.max(last + 1, t[1] * 1000000 + t[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', 30000)
redis.call('SET', KEYS[2], string.format('%.0f', token), 'EX', 604800)
return string.format('%.0f', token)
"""
_FREE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


def _packed(*words: str) -> bytes:
    body = b"".join(b"$%d\r\n%s\r\n" % (len(w.encode()), w.encode()) for w in words)
    return b"*%d\r\n%s" % (len(words), body)


def _redis_limit(url: str) -> Hold:
    """Two prebuilt EVALSHA over a bare socket."""
    parts = urlsplit(url)
    sock = socket.create_connection((parts.hostname or "localhost", parts.port or 6379))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    send, receive = sock.sendall, sock.recv

    def load(script: str) -> str:
        send(_packed("SCRIPT", "LOAD", script))
        return receive(4096).split(b"\r\n")[1].decode()

    keys = ("{limit}:lock", "{limit}:token")
    take = _packed("EVALSHA", load(_TAKE), "2", *keys, "owner")
    free = _packed("EVALSHA", load(_FREE), "1", keys[0], "owner")

    def hold() -> None:
        send(take)
        receive(4096)
        send(free)
        receive(4096)

    return hold


CONTENDERS = [
    Contender("bare upsert and release", "sqlite", True, _sqlite_limit),
    Contender("Holdfast", "sqlite", False, _holdfast),
    Contender("raw socket, prebuilt scripts", "redis", True, _redis_limit),
    Contender("Holdfast", "redis", False, _holdfast),
]
