"""Everybody on one PostgreSQL."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from benchmarks.contenders.common import ALONE, WAITS, nothing, split
from benchmarks.contenders.postgres_raw import RawPostgres, replay, statements
from benchmarks.tape import record
from holdfast.bench.contender import (
    CONTENDED,
    DRAIN,
    HELD,
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


def _key(name: str) -> int:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _replay(options: str) -> Opener:
    def opened(target: Target) -> Client:
        tape = record(target.url + options, target.namespace + options[-8:])
        return split(replay(target.url, tape), tape.recorded.close)

    return opened


def _library(options: str) -> Opener:
    """The statements that were recorded, on a bare psycopg connection, prepared."""

    def opened(target: Target) -> Client:
        import psycopg

        tape = record(target.url + options, target.namespace + options[-8:])
        connection: Any = psycopg.connect(
            target.url, autocommit=True, cursor_factory=psycopg.RawCursor
        )
        connection.prepare_threshold = 0

        def step(sql: str, parameters: list[Any]) -> Callable[[], Any]:
            return lambda: connection.execute(sql, parameters).fetchall()

        steps = []
        for used in statements(tape):
            texts = [None if p is None else p.decode() for p in used.parameters]
            steps.append(step(used.sql.decode(), texts))
        return split(steps, tape.recorded.close)

    return opened


def _raw(target: Target) -> RawPostgres:
    parts = urlsplit(target.url)
    return RawPostgres(target.url, parts.username or "", parts.path.lstrip("/"))


def _least(target: Target) -> Client:
    """An advisory lock over a bare socket: no fence, no ttl."""

    def lock(name: str) -> Pair:
        wire = _raw(target)
        take = wire.pack(f"SELECT pg_advisory_lock({_key(name)})")
        free = wire.pack(f"SELECT pg_advisory_unlock({_key(name)})")
        return Pair(lambda: wire.send(take), lambda: wire.send(free))

    return Client(lock, nothing)


def _fenced(target: Target) -> Client:
    """The same with a counter row, as a fence needs: two statements in one request, one commit."""
    first = _raw(target)
    first.send(
        first.pack("CREATE TABLE IF NOT EXISTS bench_counter (name text PRIMARY KEY, token bigint)")
    )

    def lock(name: str) -> Pair:
        wire = _raw(target)
        take = wire.pack(
            f"SELECT pg_advisory_lock({_key(name)}); INSERT INTO bench_counter VALUES ('{name}', 1)"
            " ON CONFLICT (name) DO UPDATE SET token = bench_counter.token + 1 RETURNING token"
        )
        free = wire.pack(f"SELECT pg_advisory_unlock({_key(name)})")
        return Pair(lambda: wire.send(take), lambda: wire.send(free))

    return Client(lock, first.close)


def _psycopg(target: Target) -> Client:
    import psycopg

    def lock(name: str) -> Pair:
        connection = psycopg.connect(target.url, autocommit=True)
        key = (_key(name),)
        return Pair(
            lambda: connection.execute("SELECT pg_advisory_lock(%s)", key).fetchone(),
            lambda: connection.execute("SELECT pg_advisory_unlock(%s)", key).fetchone(),
        )

    return Client(lock, nothing)


async def _psycopg_async(target: Target) -> Client:
    import psycopg

    connection = await psycopg.AsyncConnection.connect(target.url, autocommit=True)

    def lock(name: str) -> Pair:
        key = (_key(name),)

        async def acquire() -> None:
            await (await connection.execute("SELECT pg_advisory_lock(%s)", key)).fetchone()

        async def release() -> None:
            await (await connection.execute("SELECT pg_advisory_unlock(%s)", key)).fetchone()

        return Pair(acquire, release)

    return Client(lock, connection.close)


async def _asyncpg(target: Target) -> Client:
    import asyncpg

    connection = await asyncpg.connect(target.url)

    def lock(name: str) -> Pair:
        key = _key(name)

        async def acquire() -> None:
            await connection.fetchval("SELECT pg_advisory_lock($1)", key)

        async def release() -> None:
            await connection.fetchval("SELECT pg_advisory_unlock($1)", key)

        return Pair(acquire, release)

    return Client(lock, connection.close)


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
    """Holdfast in its advisory mode: the same clients at the same URL with an option."""
    from dataclasses import replace

    def aimed(open_: Opener | None) -> Opener | None:
        if open_ is None:
            return None
        return lambda target: open_(_advised(target))

    cases = frozenset({UNCONTENDED, CONTENDED})
    made = ours("postgres", "Holdfast advisory", cases)
    return [replace(one, open=aimed(one.open) or one.open, open_held=None) for one in made]


def _one(name: str, role: Any, open_: Opener, cases: frozenset[str] = WAITS) -> Contender:
    flavour: Flavour = "asyncio" if "async" in name else "blocking"
    return Contender(name, "postgres", role, flavour, open_, cases)


CONTENDERS = [
    _one("raw socket, same requests", "limit", _replay(""), ALONE),
    _one("raw socket, same requests (advisory)", "limit", _replay(ADVISORY), ALONE),
    _one("raw socket, advisory lock", "least", _least),
    _one("raw socket, advisory lock and counter row", "limit", _fenced, frozenset({CONTENDED})),
    _one("psycopg, same requests", "library", _library(""), ALONE),
    _one("psycopg, same requests (advisory)", "library", _library(ADVISORY), ALONE),
    *ours("postgres", cases=frozenset({UNCONTENDED, CONTENDED, DRAIN, HELD})),
    *_advisory(),
    _one("psycopg pg_advisory_lock", "peer", _psycopg),
    _one("psycopg asyncio pg_advisory_lock", "peer", _psycopg_async),
    _one("asyncpg pg_advisory_lock", "peer", _asyncpg),
    _one("tooz postgresql", "peer", _tooz),
]
