"""A rollback to a savepoint ends what a guard or a transaction's lock did, and nobody is told:
where it can be known that a savepoint is open, both are refused."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import holdfast
from fencing.databases import Connect, fence, ready
from holdfast import Fence, Mode, StaleFence, Unsupported
from holdfast.fencing import sql
from holdfast.sql import transaction_lock
from servers.mysql import MySQLServer
from servers.postgres import PostgresServer
from servers.registry import Servers

REFUSED = r"inside a savepoint(.|\n)*savepoint=True"
KINDS = {"exclusive": Mode.EXCLUSIVE, "shared": Mode.SHARED, "slot": Mode.SLOTS}


def entering(kind: str, token: int) -> Fence:
    return fence(token, KINDS[kind], *((1,) if kind == "slot" else ()))


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def connection(servers: Servers) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(servers.of(PostgresServer).url) as made:
        made.execute("DROP TABLE IF EXISTS holdfast_fence")
        sql.create(made)
        made.commit()
        yield made
        made.rollback()


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("known", [True, False], ids=["an old row", "a new row"])
def test_postgresql_tells_of_any_savepoint(
    connection: psycopg.Connection[Any], kind: str, known: bool
) -> None:
    """Of psycopg's own and of one by hand; what is over is none."""
    if known:
        sql.guard(connection, "r", entering(kind, 4))
        connection.commit()
    with connection.transaction():
        with pytest.raises(Unsupported, match=REFUSED), connection.transaction():
            sql.guard(connection, "r", entering(kind, 5))
        connection.execute("SAVEPOINT by_hand")
        with pytest.raises(Unsupported, match=REFUSED):
            sql.guard(connection, "r", entering(kind, 5))
        connection.execute("ROLLBACK TO by_hand")
        connection.execute("RELEASE by_hand")
        sql.guard(connection, "r", entering(kind, 5))
        with connection.transaction():  # it has entered before: this one is no harm
            connection.execute("SELECT 1")
    with pytest.raises(StaleFence), connection.transaction():
        sql.guard(connection, "r", entering("slot" if kind == "slot" else "exclusive", 3))


def test_over_asyncio(connection: psycopg.Connection[Any]) -> None:
    connection.commit()

    async def body() -> None:
        url = connection.info.dsn
        async with await psycopg.AsyncConnection.connect(url) as ours, ours.transaction():
            with pytest.raises(Unsupported, match=REFUSED):
                async with ours.transaction():
                    await sql.guard(ours, "r", fence(5))
            await sql.guard(ours, "r", fence(5))

    asyncio.run(body())


def test_what_a_rollback_takes_away(connect: Connect) -> None:
    """Why it is refused: nothing is remembered of who goes on."""
    connection = ready(connect)
    connection.cursor().execute("BEGIN")
    connection.cursor().execute("SAVEPOINT s")
    sql.guard(connection, "r", fence(5), savepoint=True)
    connection.cursor().execute("ROLLBACK TO SAVEPOINT s")
    connection.commit()
    sql.guard(connection, "r", fence(4))
    connection.rollback()


@pytest.mark.parametrize("session", [True, False], ids=["session", "connection"])
@pytest.mark.parametrize("kind", ["postgresql", "mysql", "sqlite"])
def test_sqlalchemy_tells_of_a_nested_transaction(
    servers: Servers, tmp_path: Path, kind: str, session: bool
) -> None:
    urls = {
        "postgresql": lambda: servers.of(PostgresServer).url.replace("://", "+psycopg://"),
        "mysql": lambda: servers.of(MySQLServer).url.replace("://", "+pymysql://"),
        "sqlite": lambda: f"sqlite:///{tmp_path}/a.db",
    }
    engine = sqlalchemy.create_engine(urls[kind]())
    with Session(engine) if session else engine.connect() as ours:
        ours.execute(sqlalchemy.text("DROP TABLE IF EXISTS holdfast_fence"))
        ours.commit()
        sql.create(ours)
        ours.commit()
        with pytest.raises(Unsupported, match=REFUSED), ours.begin_nested():
            sql.guard(ours, "r", fence(5))
        ours.rollback()
        with ours.begin_nested():
            sql.guard(ours, "r", fence(5), savepoint=True)
        sql.guard(ours, "r", fence(5))
        ours.commit()
    engine.dispose()


def test_sqlalchemy_tells_on_asyncio(servers: Servers) -> None:
    async def body() -> None:
        url = servers.of(PostgresServer).url.replace("://", "+psycopg://")
        engine = create_async_engine(url)
        async with AsyncSession(engine) as session:
            with pytest.raises(Unsupported, match=REFUSED):
                async with session.begin_nested():
                    await sql.guard(session, "r", fence(5, name="other"))
        async with engine.connect() as connection:
            with pytest.raises(Unsupported, match=REFUSED):
                async with connection.begin_nested():
                    await sql.guard(connection, "r", fence(5, name="other"))
        await engine.dispose()

    asyncio.run(body())


def test_a_scoped_session_is_the_session_behind_it(servers: Servers, namespace: str) -> None:
    """As ``db.session`` of Flask-SQLAlchemy is: taken as any other session, and as nested."""
    url = servers.of(PostgresServer).url
    with holdfast.connect(url, namespace=namespace) as locks, locks.lock("any"):
        pass
    engine = sqlalchemy.create_engine(url.replace("://", "+psycopg://"))
    session = scoped_session(sessionmaker(engine))
    sql.guard(session, namespace, fence(5))
    assert transaction_lock(session, "name", namespace=namespace).token
    session.commit()
    with pytest.raises(StaleFence):
        sql.guard(session, namespace, fence(4))
    session.rollback()
    with pytest.raises(Unsupported, match=REFUSED), session.begin_nested():
        sql.guard(session, namespace, fence(5))
    session.remove()
    engine.dispose()


def test_a_scoped_session_on_asyncio(servers: Servers, namespace: str) -> None:
    async def body() -> None:
        engine = create_async_engine(servers.of(PostgresServer).url.replace("://", "+psycopg://"))
        made = async_sessionmaker(engine)
        session = async_scoped_session(made, scopefunc=asyncio.current_task)
        await sql.guard(session, namespace, fence(5))
        await session.commit()
        with pytest.raises(StaleFence):
            await sql.guard(session, namespace, fence(4))
        await session.remove()
        await engine.dispose()

    asyncio.run(body())


def test_a_lock_of_the_transaction_is_refused_too(servers: Servers, namespace: str) -> None:
    """Its key and its token end with the savepoint."""
    url = servers.of(PostgresServer).url
    with holdfast.connect(url, namespace=namespace) as locks, locks.lock("any"):
        pass
    with psycopg.connect(url) as ours, ours.transaction():
        with pytest.raises(Unsupported, match=REFUSED), ours.transaction():
            transaction_lock(ours, "name", namespace=namespace)
        with ours.transaction():
            transaction_lock(ours, "name", namespace=namespace, savepoint=True)
        assert transaction_lock(ours, "name", namespace=namespace, timeout=5).token


def test_a_lock_of_the_transaction_is_refused_by_sqlalchemy(
    servers: Servers, namespace: str
) -> None:
    url = servers.of(MySQLServer).url
    with holdfast.connect(url, namespace=namespace) as locks, locks.lock("any"):
        pass
    engine = sqlalchemy.create_engine(url.replace("://", "+pymysql://"))
    with engine.connect() as ours:
        with pytest.raises(Unsupported, match=REFUSED), ours.begin_nested():
            transaction_lock(ours, "name", namespace=namespace)
        assert transaction_lock(ours, "name", namespace=namespace).token
    engine.dispose()
