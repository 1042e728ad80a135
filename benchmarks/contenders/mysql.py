"""Everybody on one MariaDB."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from benchmarks.contenders.common import ALONE, WAITS, nothing, split
from benchmarks.tape import record, replayer
from holdfast.bench.contender import (
    CONTENDED,
    UNCONTENDED,
    Client,
    Contender,
    Flavour,
    Opener,
    Pair,
    Target,
    ours,
)

__all__ = ["CONTENDERS"]

ADVISORY = "?mode=advisory"


def _connect(target: Target) -> Any:
    import pymysql

    parts = urlsplit(target.url)
    return pymysql.connect(
        host=parts.hostname or "",
        port=parts.port or 3306,
        user=parts.username,
        password=parts.password or "",
        database=parts.path.lstrip("/"),
        autocommit=True,
        client_flag=pymysql.constants.CLIENT.MULTI_STATEMENTS,
    )


def complete(reply: bytes) -> bool:
    """Whether a reply is whole: an OK or an error is one packet, a result ends with an EOF."""
    packets, at = [], 0
    while at + 4 <= len(reply):
        size = int.from_bytes(reply[at : at + 3], "little")
        packets.append(reply[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(reply) or not packets:
        return False
    last = packets[-1]
    if last[0] == 0xFF:
        return True
    if len(packets) == 1 or packets[-2][0] == 0x00 or _begins_anew(packets[-2]):
        return last[0] == 0x00 and not _more(_status(last))
    return last[0] == 0xFE and len(last) < 9 and not _more(last[3:5]) and _rows_ended(packets)


def _status(packet: bytes) -> bytes:
    """The status of an OK packet, behind two numbers of any length."""
    at = 1
    for _ in range(2):
        at += {0xFC: 3, 0xFD: 4, 0xFE: 9}.get(packet[at], 1)
    return packet[at : at + 2]


def _begins_anew(packet: bytes) -> bool:
    """Whether a result ends here and that of another statement follows."""
    return packet[0] == 0xFE and len(packet) < 9 and _more(packet[3:5])


def _more(status: bytes) -> bool:
    """Whether the answer to another statement of the same request follows."""
    return bool(status[:1]) and bool(status[0] & 8)


def _rows_ended(packets: list[bytes]) -> bool:
    """Of the two ends of a result, columns and rows, the second has come."""
    return sum(packet[0] == 0xFE and len(packet) < 9 for packet in packets) >= 2


def _socket(target: Target) -> Any:
    """The socket of a connection that PyMySQL has logged in, which needs a secret's hash."""
    connection = _connect(target)
    sock = connection._sock
    sock.settimeout(None)
    return connection, sock


def _packet(sql: str) -> bytes:
    data = b"\x03" + sql.encode()
    return len(data).to_bytes(3, "little") + b"\0" + data


def _replay(options: str) -> Opener:
    def opened(target: Target) -> Client:
        tape = record(target.url + options, target.namespace + options[-8:])
        connection, sock = _socket(target)
        for exchange in tape.prologue:
            if exchange[0][3:5] == b"\0\x03":  # a statement; the login can't be replayed
                replayer(sock, [exchange], complete)()
        steps = [replayer(sock, [exchange], complete) for exchange in tape.hold]

        def close() -> None:
            connection.close()
            tape.recorded.close()

        return split(steps, close)

    return opened


def _library(options: str) -> Opener:
    """The statements that were recorded, on a bare PyMySQL connection."""

    def opened(target: Target) -> Client:
        tape = record(target.url + options, target.namespace + options[-8:])
        connection = _connect(target)
        for request, _ in tape.prologue:
            if request[3:5] == b"\0\x03":
                with connection.cursor() as cursor:
                    cursor.execute(request[5:])

        def step(sql: bytes) -> Callable[[], Any]:
            def run() -> None:
                with connection.cursor() as cursor:
                    cursor.execute(sql)
                    cursor.fetchall()

            return run

        return split([step(request[5:]) for request, _ in tape.hold], tape.recorded.close)

    return opened


def _least(target: Target) -> Client:
    """A named lock over a bare socket: no fence, no ttl."""

    def lock(name: str) -> Pair:
        connection, sock = _socket(target)
        take = (_packet(f"SELECT GET_LOCK('{target.namespace}-{name}', 3600)"), b"")
        free = (_packet(f"SELECT RELEASE_LOCK('{target.namespace}-{name}')"), b"")
        pair = Pair(replayer(sock, [take], complete), replayer(sock, [free], complete))
        kept.append(connection)
        return pair

    kept: list[Any] = []
    return Client(lock, nothing)


def _fenced(target: Target) -> Client:
    """The same with a counter row, as a fence needs: two statements in one request, one commit."""
    connection, _ = _socket(target)
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE IF NOT EXISTS bench_counter (name VARCHAR(200) PRIMARY KEY,"
            " token BIGINT NOT NULL)"
        )

    def lock(name: str) -> Pair:
        own, sock = _socket(target)
        word = f"{target.namespace}-{name}"
        take = f"SELECT GET_LOCK('{word}', 3600); INSERT INTO bench_counter VALUES ('{word}', 1)"
        take += " ON DUPLICATE KEY UPDATE token = LAST_INSERT_ID(token + 1)"
        free = f"SELECT RELEASE_LOCK('{word}')"
        kept.append(own)
        return Pair(*(replayer(sock, [(_packet(sql), b"")], complete) for sql in (take, free)))

    kept: list[Any] = []
    return Client(lock, connection.close)


def _pymysql(target: Target) -> Client:
    def lock(name: str) -> Pair:
        connection = _connect(target)
        words = (f"{target.namespace}-{name}",)

        def run(sql: str) -> Callable[[], Any]:
            def step() -> Any:
                with connection.cursor() as cursor:
                    cursor.execute(sql, words)
                    return cursor.fetchone()

            return step

        return Pair(run("SELECT GET_LOCK(%s, 3600)"), run("SELECT RELEASE_LOCK(%s)"))

    return Client(lock, nothing)


async def _aiomysql(target: Target) -> Client:
    import aiomysql

    parts = urlsplit(target.url)
    connection = await aiomysql.connect(
        host=parts.hostname,
        port=parts.port,
        user=parts.username,
        password=parts.password,
        autocommit=True,
    )

    def lock(name: str) -> Pair:
        words = (f"{target.namespace}-{name}",)

        async def run(sql: str) -> None:
            async with connection.cursor() as cursor:
                await cursor.execute(sql, words)
                await cursor.fetchone()

        return Pair(
            lambda: run("SELECT GET_LOCK(%s, 3600)"), lambda: run("SELECT RELEASE_LOCK(%s)")
        )

    return Client(lock, connection.ensure_closed)


def _tooz(target: Target) -> Client:
    from tooz import coordination

    coordinator = coordination.get_coordinator(target.url, b"benchmark")
    coordinator.start()

    def lock(name: str) -> Pair:
        made = coordinator.get_lock(f"{target.namespace}-{name}".encode())
        return Pair(made.acquire, made.release)

    return Client(lock, coordinator.stop)


def _advised(target: Target) -> Target:
    """A namespace has one mode."""
    return target._replace(url=target.url + ADVISORY, namespace=f"{target.namespace}-advisory")


def _advisory() -> list[Contender]:
    def aimed(open_: Opener) -> Opener:
        return lambda target: open_(_advised(target))

    made = ours("mysql", "Holdfast advisory", frozenset({UNCONTENDED, CONTENDED}))
    return [replace(one, open=aimed(one.open), open_held=None) for one in made]


def _one(name: str, role: Any, open_: Opener, cases: frozenset[str] = WAITS) -> Contender:
    flavour: Flavour = "asyncio" if name.startswith("aio") else "blocking"
    return Contender(name, "mysql", role, flavour, open_, cases)


CONTENDERS = [
    _one("raw socket, same requests", "limit", _replay(""), ALONE),
    _one("raw socket, same requests (advisory)", "limit", _replay(ADVISORY), ALONE),
    _one("raw socket, GET_LOCK", "least", _least),
    _one("raw socket, GET_LOCK and counter row", "limit", _fenced, frozenset({CONTENDED})),
    _one("PyMySQL, same requests", "library", _library(""), ALONE),
    _one("PyMySQL, same requests (advisory)", "library", _library(ADVISORY), ALONE),
    *ours("mysql"),
    *_advisory(),
    _one("PyMySQL GET_LOCK", "peer", _pymysql),
    _one("aiomysql GET_LOCK", "peer", _aiomysql),
    _one("tooz mysql", "peer", _tooz),
]
