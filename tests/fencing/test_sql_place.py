"""Where fences are remembered: in one table, whatever a session's settings are."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import sqlalchemy

from fencing.databases import fence
from holdfast import Mode, StaleFence, Unsupported
from holdfast.fencing import sql
from holdfast.fencing.sql import table as sql_table
from servers.postgres import PostgresServer
from servers.registry import Servers

TABLE = "holdfast_fence"


@pytest.fixture
def database(servers: Servers) -> Iterator[str]:
    """The URL of an empty database."""
    url, name = servers.of(PostgresServer).url, f"d{secrets.token_hex(6)}"
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
        yield url.rpartition("/")[0] + f"/{name}"
        admin.execute(f"DROP DATABASE {name} (FORCE)".encode())


def enter(url: str, token: int, path: str = "", table: str = TABLE) -> None:
    """A program with a search_path of its own."""
    sql_table._present.clear()  # another process
    with psycopg.connect(url) as connection:
        if path:
            connection.execute(f"SET search_path = {path}".encode())
        sql.guard(connection, "r", fence(token), table=table)


def tables(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT schemaname FROM pg_tables WHERE tablename = %s ORDER BY 1", (TABLE,)
        )
        return [str(row[0]) for row in rows]


def make(url: str, *schemas: str) -> None:
    with psycopg.connect(url) as connection:
        for schema in schemas:
            connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}".encode())
            sql.create(connection, table=f"{schema}.{TABLE}")


def test_the_search_path_does_not_matter(database: str) -> None:
    """One table for programs that look elsewhere first, or nowhere; a temporary one is none."""
    with psycopg.connect(database) as admin:
        admin.execute("CREATE SCHEMA worker")
    enter(database, 34, "worker, public")
    for path in ("", "public", "worker", "''", "pg_catalog"):
        with pytest.raises(StaleFence):
            enter(database, 33, path)
    assert tables(database) == ["public"]


@pytest.mark.parametrize("path", ["worker, public", "public, worker"])
def test_a_second_memory_on_the_path_is_refused(database: str, path: str) -> None:
    """An older version may have made it: who is right can't be told from here."""
    make(database, "public", "worker")
    with pytest.raises(Unsupported, match=r"also worker\.holdfast_fence"):
        enter(database, 34, path)
    enter(database, 34, "public")  # nothing to do with it: this program never had another one
    enter(database, 35, path, "worker.holdfast_fence")  # said to be the one


def test_no_second_memory_is_made(database: str) -> None:
    """The table is not where it should be, and there is one elsewhere: it is not forgotten."""
    make(database, "worker")
    for path in ("", "worker"):
        with pytest.raises(Unsupported, match=r"public.holdfast_fence, which is missing, but .*"):
            enter(database, 34, path)
    with psycopg.connect(database) as connection, pytest.raises(Unsupported, match="worker"):
        sql.create(connection)
    assert tables(database) == ["worker"]
    with psycopg.connect(database) as connection:
        connection.execute(f"ALTER TABLE worker.{TABLE} SET SCHEMA public".encode())
    enter(database, 34)


def test_the_one_on_the_path_is_named_first(database: str) -> None:
    """Several programs of one database had a table each; and one that is not ours is no end."""
    make(database, "aardvark", "worker")
    with pytest.raises(Unsupported, match=r"name it \(table='worker\.holdfast_fence'\)"):
        enter(database, 34, "worker")
    with pytest.raises(Unsupported, match=r"not yours.*table='public\.holdfast_fence'\)"):
        enter(database, 34)
    make(database, "public")
    enter(database, 34)


@pytest.fixture
def role(database: str) -> Iterator[str]:
    """An ordinary role's URL of that database: since PostgreSQL 15 it may not create in public."""
    name = f"r{secrets.token_hex(6)}"
    with psycopg.connect(database, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {name} LOGIN".encode())
        yield database.replace("://holdfast@", f"://{name}@")
        admin.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


def test_an_ordinary_role_is_told_what_to_do(database: str, role: str) -> None:
    with pytest.raises(Unsupported, match=r"CREATE TABLE(.|\n)*GRANT(.|\n)*table='your_schema\."):
        enter(role, 1)
    make(database, "public")
    grant = "GRANT SELECT, INSERT, UPDATE ON public.holdfast_fence TO your_account;"
    with pytest.raises(Unsupported, match=grant) as caught:
        enter(role, 1)
    name = role.partition("://")[2].partition("@")[0]
    with psycopg.connect(database) as admin:
        admin.execute(str(caught.value).splitlines()[-1].replace("your_account", name).encode())
    enter(role, 2)
    with pytest.raises(StaleFence):
        enter(role, 1)


OPERATORS = ("=", "<>", "<", "<=", ">", ">=")
TYPES = ("text", "bigint", "boolean", '"char"', "oid", "name")


def test_no_operator_of_another_role_runs(database: str) -> None:
    """Also where the search_path has pg_catalog last: all that is used is named in full."""
    with psycopg.connect(database) as admin:
        admin.execute("CREATE SCHEMA theirs; GRANT ALL ON SCHEMA theirs TO PUBLIC")
        for kind in TYPES:
            admin.execute(
                f"""CREATE FUNCTION theirs.caught(a {kind}, b {kind}) RETURNS boolean
                LANGUAGE plpgsql AS $$ BEGIN RAISE 'caught as %', CURRENT_USER; END $$""".encode()
            )
            for operator in OPERATORS:
                admin.execute(
                    f"""CREATE OPERATOR theirs.{operator} (LEFTARG = {kind}, RIGHTARG = {kind},
                    FUNCTION = theirs.caught)""".encode()
                )
    path = "theirs, public, pg_catalog"
    sql_table._present.clear()
    with psycopg.connect(database, options=f"-c search_path={path.replace(' ', '')}") as ours:
        for asked in (fence(4), fence(5, Mode.SHARED), fence(5, Mode.SHARED), fence(6)):
            sql.guard(ours, "r", asked)
            ours.commit()
        for asked in (fence(5), fence(5, Mode.SHARED), fence(7, name="another")):
            with pytest.raises(StaleFence):
                sql.guard(ours, "r", asked)
            ours.rollback()


def test_a_temporary_table_is_refused(database: str) -> None:
    """It would be found before all others, and be gone with the session."""
    with psycopg.connect(database) as connection:
        sql.create(connection)
        connection.execute(f"CREATE TEMP TABLE {TABLE} (n int)".encode())
        connection.commit()
        with pytest.raises(Unsupported, match=r"also pg_temp_\d+\.holdfast_fence"):
            sql.guard(connection, "r", fence(1))
        enter(database, 2)  # another session's


def test_over_asyncio_and_sqlalchemy(database: str) -> None:
    make(database, "worker")

    async def body() -> None:
        async with await psycopg.AsyncConnection.connect(database) as connection:
            with pytest.raises(Unsupported, match=r"worker\.holdfast_fence"):
                await sql.guard(connection, "r", fence(1))

    asyncio.run(body())
    engine = sqlalchemy.create_engine(database.replace("://", "+psycopg://"))
    with engine.connect() as connection, pytest.raises(Unsupported, match=r"worker\.holdfast"):
        sql.guard(connection, "r", fence(1))
    engine.dispose()


def test_sqlite_remembers_in_the_main_database(tmp_path: Path) -> None:
    """A temporary table, which would be found first, does not matter."""
    connection = sqlite3.connect(tmp_path / "a.db")
    sql.guard(connection, "r", fence(34))
    connection.commit()
    connection.execute(f"CREATE TEMP TABLE {TABLE} AS SELECT * FROM main.{TABLE} WHERE 0")
    connection.commit()
    with pytest.raises(StaleFence):
        sql.guard(connection, "r", fence(33))
    connection.close()


def test_sqlite_makes_no_second_memory(tmp_path: Path) -> None:
    """What the attached database remembers is not forgotten."""
    shop = sqlite3.connect(tmp_path / "shop.db")
    sql.guard(shop, "r", fence(34))
    shop.commit()
    shop.close()
    report = sqlite3.connect(tmp_path / "report.db")
    report.execute("ATTACH ? AS shop", (str(tmp_path / "shop.db"),))
    with pytest.raises(Unsupported, match=r"main.holdfast_fence, which is missing, .*also shop\."):
        sql.guard(report, "r", fence(33))
    report.rollback()
    with pytest.raises(StaleFence):
        sql.guard(report, "r", fence(33), table=f"shop.{TABLE}")
    report.close()
