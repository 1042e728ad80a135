"""What is peculiar to guards in SQL: transactions, the table, the drivers' own habits."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pymysql.cursors
import pytest
import sqlalchemy
from psycopg.rows import dict_row

from fencing.accounts import mysql_settings
from fencing.databases import Connect, dialect, fence, ready, refused
from holdfast import InvalidName, Mode, StaleFence, Unsupported
from holdfast.fencing import sql
from holdfast.fencing.sql.drivers import driver_of
from servers.mysql import MySQLServer
from servers.postgres import PostgresServer
from servers.registry import Servers


def test_the_table_is_made_on_first_use(connect: Connect) -> None:
    """Except in MySQL, where that would end the transaction: it says what to do."""
    connection = connect()
    if dialect(connection) == "mysql":
        with pytest.raises(Unsupported, match=r"fencing\.sql\.create(.|\n)*CREATE TABLE"):
            sql.guard(connection, "r", fence(1))
        sql.create(connection)
    sql.guard(connection, "r", fence(2))
    connection.commit()
    refused(connect(), fence(1))
    sql.create(connection)  # again: nothing happens
    refused(connection, fence(1))


def test_a_rollback_takes_everything_back(connect: Connect) -> None:
    connection = connect()
    if dialect(connection) == "mysql":
        sql.create(connection)
    for _ in range(2):
        sql.guard(connection, "r", fence(9))
        connection.rollback()
    sql.guard(connection, "r", fence(3))
    connection.commit()


def test_a_table_that_went_away_is_made_again(servers: Servers) -> None:
    with psycopg.connect(servers.of(PostgresServer).url) as connection:
        for _ in range(2):  # the second one finds it, in the same transaction
            sql.guard(connection, "r", fence(9))
        connection.execute("DROP TABLE holdfast_fence")
        connection.commit()
        with pytest.raises(psycopg.errors.UndefinedTable):
            sql.guard(connection, "r", fence(9))
        connection.rollback()
        sql.guard(connection, "r", fence(8))
        connection.rollback()


def test_autocommit_is_refused(connect: Connect) -> None:
    connection = ready(connect)
    if dialect(connection) == "sqlite":
        connection.isolation_level = None
    elif dialect(connection) == "mysql":
        connection.autocommit(True)
    else:
        connection.autocommit = True
    with pytest.raises(Unsupported, match="outside a transaction"):
        sql.guard(connection, "r", fence(1))
    connection.cursor().execute("BEGIN")
    sql.guard(connection, "r", fence(1))
    connection.cursor().execute("COMMIT")
    with pytest.raises(Unsupported, match="outside a transaction"):
        sql.guard(connection, "r", fence(1))


def test_readers_that_came_before_work_side_by_side(connect: Connect) -> None:
    first, second, writer = ready(connect), connect(), connect()
    for connection, token in ((first, 4), (second, 5)):
        sql.guard(connection, "r", fence(token, Mode.SHARED))
        connection.commit()
    sql.guard(first, "r", fence(4, Mode.SHARED))
    sql.guard(second, "r", fence(5, Mode.SHARED))  # both are open at once
    first.commit()
    second.commit()
    sql.guard(writer, "r", fence(6))
    writer.commit()
    refused(first, fence(4, Mode.SHARED))


def test_a_reader_whose_first_entry_was_rolled_back_enters_anew(connect: Connect) -> None:
    connection = ready(connect)
    sql.guard(connection, "r", fence(7, Mode.SHARED))
    connection.rollback()
    sql.guard(connection, "r", fence(7, Mode.SHARED))
    connection.commit()
    refused(connection, fence(6), "reader")


@pytest.mark.parametrize("connect", ["postgresql", "mysql"], indirect=True)
def test_permits_work_side_by_side(connect: Connect) -> None:
    """Not in SQLite, which has one writer at a time."""
    first, second = ready(connect), connect()
    for _ in range(2):
        sql.guard(first, "r", fence(4, Mode.SLOTS, 0))
        sql.guard(second, "r", fence(5, Mode.SLOTS, 1))
        first.commit()
        second.commit()


def test_one_statement(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = ready(connect)
    for _ in range(2):  # the first entry makes the row, and looks for the table
        sql.guard(connection, "r", fence(4))
        connection.commit()
    asked: list[str] = []
    kind = type(driver_of(connection))
    real = kind.execute

    async def counting(self: Any, text: str, parameters: Any) -> Any:
        asked.append(text)
        return await real(self, text, parameters)

    monkeypatch.setattr(kind, "execute", counting)
    for token in (4, 5):
        sql.guard(connection, "r", fence(token))
        connection.commit()
    assert len(asked) == 2


def test_names_are_compared_byte_by_byte(connect: Connect) -> None:
    connection = ready(connect)
    names = ["a", "A", "a ", "ä", "a\u0308", "€" * 170, "%s :name 'x' \\ {}"]
    for number, name in enumerate(names):
        sql.guard(connection, name, fence(10 + number, name=name))
    for number, name in enumerate(names):
        sql.guard(connection, name, fence(10 + number, name=name))
        with pytest.raises(StaleFence):
            sql.guard(connection, name, fence(9, name=name))
    connection.rollback()


def test_a_table_of_ones_own(connect: Connect) -> None:
    connection = connect()
    sql.create(connection, table="our_fences")
    connection.commit()
    sql.guard(connection, "r", fence(5), table="our_fences")
    connection.commit()
    refused(connection, fence(4), table="our_fences")
    connection.cursor().execute("DROP TABLE our_fences")
    connection.commit()
    for table in ("Robert'); DROP TABLE students", "a.b.c", ""):
        with pytest.raises(ValueError, match="table"):
            sql.guard(connection, "r", fence(4), table=table)


def test_rows_of_another_shape(connect: Connect) -> None:
    """A connection may give dictionaries; ours are our own."""
    connection = ready(connect)
    if dialect(connection) == "postgresql":
        connection.row_factory = dict_row
    elif dialect(connection) == "mysql":
        connection.cursorclass = pymysql.cursors.DictCursor
    else:
        connection.row_factory = sqlite3.Row
    sql.guard(connection, "r", fence(5, Mode.SHARED))
    connection.commit()
    sql.guard(connection, "r", fence(5, Mode.SHARED))
    connection.commit()
    refused(connection, fence(4), "token 5")


def test_bad_input(connect: Connect) -> None:
    connection = ready(connect)
    with pytest.raises(InvalidName, match="resource's name can't be empty"):
        sql.guard(connection, "", fence(1))
    with pytest.raises(TypeError, match="a lease or a fence, not int"):
        sql.guard(connection, "r", 7)
    with pytest.raises(ValueError, match="not a fence"):
        sql.guard(connection, "r", "7")
    with pytest.raises(ValueError, match="slots do not match"):
        sql.guard(connection, "r", fence(1, Mode.SLOTS))
    with pytest.raises(TypeError, match=r"not builtins\.int"):
        sql.guard(7, "r", fence(1))
    with pytest.raises(TypeError, match=r"not sqlalchemy.*Engine"):
        sql.guard(sqlalchemy.create_engine("sqlite://"), "r", fence(1))
    sql.guard(connection, "r", str(fence(1)))
    connection.rollback()


def test_no_right_to_create(servers: Servers) -> None:
    url = servers.of(PostgresServer).url
    with psycopg.connect(url) as admin:
        admin.execute("DROP TABLE IF EXISTS holdfast_fence")
        admin.execute("DROP ROLE IF EXISTS humble")
        admin.execute("CREATE ROLE humble LOGIN")
        admin.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    with psycopg.connect(url.replace("//holdfast@", "//humble@")) as humble:
        with pytest.raises(Unsupported, match=r"permission denied(.|\n)*CREATE TABLE"):
            sql.guard(humble, "r", fence(1))
        humble.rollback()


def test_autocommit_under_sqlalchemy(servers: Servers, tmp_path: Path) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    url = servers.of(PostgresServer).url.replace("://", "+psycopg://")
    engines = [
        sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT"),
        sqlalchemy.create_engine(url).execution_options(isolation_level="AUTOCOMMIT"),
        sqlalchemy.create_engine(url, connect_args={"autocommit": True}),
        sqlalchemy.create_engine(
            f"sqlite:///{tmp_path}/a.db", connect_args={"isolation_level": None}
        ),
    ]
    for engine in engines:
        with (
            engine.connect() as connection,
            pytest.raises(Unsupported, match="outside a transaction"),
        ):
            sql.guard(connection, "r", fence(1))
        engine.dispose()

    async def asynchronous() -> None:
        engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
        async with engine.connect() as connection:
            with pytest.raises(Unsupported, match="outside a transaction"):
                await sql.guard(connection, "r", fence(1))
        await engine.dispose()

    asyncio.run(asynchronous())


def test_autocommit_on_asyncio(servers: Servers) -> None:
    async def body() -> None:
        import asyncmy

        url = servers.of(PostgresServer).url
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as postgres:
            with pytest.raises(Unsupported, match="outside a transaction"):
                await sql.guard(postgres, "async", fence(1))
            async with postgres.transaction():
                await sql.guard(postgres, "async", fence(1))
        settings = mysql_settings(servers.of(MySQLServer).url)
        mysql = await asyncmy.connect(db=settings.pop("database"), autocommit=True, **settings)
        await sql.create(mysql)
        with pytest.raises(Unsupported, match="outside a transaction"):
            await sql.guard(mysql, "async", fence(1))
        await mysql.begin()
        await sql.guard(mysql, "async", fence(1))
        await mysql.rollback()
        await mysql.ensure_closed()

    asyncio.run(body())


def test_in_a_pipeline_of_psycopg(servers: Servers) -> None:
    with psycopg.connect(servers.of(PostgresServer).url) as connection:
        with connection.pipeline():
            sql.guard(connection, "pipeline", fence(5))
            sql.guard(connection, "pipeline", fence(6, Mode.SHARED))
            with pytest.raises(StaleFence, match="reader"):
                sql.guard(connection, "pipeline", fence(5))
        connection.rollback()


def test_the_schema_can_be_read() -> None:
    places = {"postgresql": "public.ours", "mysql": "ours", "sqlite": "main.ours"}
    for name, place in places.items():
        assert f"CREATE TABLE IF NOT EXISTS {place} (" in sql.schema(name, table="ours")
        assert "CREATE TABLE IF NOT EXISTS its.ours (" in sql.schema(name, table="its.ours")
    with pytest.raises(ValueError, match="no guard for 'oracle'"):
        sql.schema("oracle")
