"""Guards on MySQL: in any SQL mode, and whatever the transaction has read before."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import asyncmy
import pymysql
import pytest
import sqlalchemy

from fencing.accounts import mysql_settings
from fencing.databases import Beside, fence
from holdfast import Fence, Mode, StaleFence, Unsupported
from holdfast.fencing import rule, sql
from servers.mysql import MySQLServer
from servers.process import wait_until
from servers.registry import Servers
from stores.mysql.helpers import open_admin

Connect = Callable[..., Any]


@pytest.fixture
def url(servers: Servers) -> str:
    return servers.of(MySQLServer).url


@pytest.fixture
def connect(url: str) -> Iterator[Connect]:
    opened: list[Any] = []

    def open_one(**options: Any) -> Any:
        opened.append(pymysql.connect(**mysql_settings(url), **options))
        return opened[-1]

    yield open_one
    for connection in opened:
        connection.close()


@pytest.fixture
def stock(connect: Connect) -> str:
    """A resource, and a table of its name that has 10 of it."""
    name = f"stock_{secrets.token_hex(4)}"
    connection = connect()
    sql.create(connection)
    ask(connection, f"CREATE TABLE {name} (n INT) ENGINE=InnoDB")
    ask(connection, f"INSERT INTO {name} VALUES (10)")
    connection.commit()
    return name


def ask(connection: Any, text: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(text)
        return cursor.fetchall()


def sell(connection: Any, stock: str, asked: Fence) -> None:
    """Reads in one step and writes in another, guarded."""
    sql.guard(connection, stock, asked)
    ((left,),) = ask(connection, f"SELECT n FROM {stock}")
    ask(connection, f"UPDATE {stock} SET n = {left - 1}")
    connection.commit()


def fences(seed: int) -> Iterator[Fence]:
    chance = random.Random(seed)
    for _ in range(120):
        mode = chance.choice([Mode.EXCLUSIVE, Mode.SHARED])
        name = chance.choice(["lock"] * 9 + ["other"])
        yield Fence(name, mode, (), chance.choice([0, 0, 1]), chance.randrange(8))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("mode", ["", "SIMULTANEOUS_ASSIGNMENT", "ORACLE", "NO_BACKSLASH_ESCAPES"])
def test_a_guard_says_what_the_rule_says_in_any_sql_mode(
    connect: Connect, stock: str, mode: str, begun: bool
) -> None:
    """Assignments see one another in some modes, and in others they do not."""
    connection = connect(sql_mode=mode)
    for seed in range(3):
        memory: rule.Memory | None = None
        for asked in fences(seed):
            against = rule.refusal(memory, asked)
            if begun:
                ask(connection, "START TRANSACTION")
            try:
                sql.guard(connection, f"{stock} {seed}", asked)
                let_in = True
                connection.commit()
            except StaleFence:
                let_in = False
                connection.rollback()
            assert let_in == (against is None), f"{asked} against {memory}"
            memory = rule.enter(memory, asked) if let_in else memory


@pytest.mark.parametrize("asked", [fence(7), fence(7, Mode.SLOTS, 0)])
def test_every_entry_changes_the_row(connect: Connect, stock: str, asked: Fence) -> None:
    """Also that of a fence which has entered before: nodes of Galera compare what was changed."""
    connection = connect()
    entries = []
    for _ in range(3):
        sql.guard(connection, stock, asked)
        connection.commit()
        entries += ask(connection, f"SELECT entries FROM holdfast_fence WHERE resource = '{stock}'")
        connection.rollback()
    assert entries == [(1,), (2,), (3,)]


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.SHARED])
def test_a_damaged_name_lets_nobody_in(connect: Connect, stock: str, mode: Mode) -> None:
    """Bytes that are no text: it is another lock's."""
    connection = connect()
    asked = fence(7, mode)
    sql.guard(connection, stock, asked)
    connection.commit()
    ask(connection, f"UPDATE holdfast_fence SET name = X'61FF' WHERE resource = '{stock}'")
    connection.commit()
    with pytest.raises(StaleFence, match=r"guarded by the lock .*xff"):
        sql.guard(connection, stock, asked)


# As an older version has made it.
OLDER = """CREATE TABLE {} (
  resource VARBINARY(512) NOT NULL, slot BIGINT NOT NULL, name VARBINARY(512) NOT NULL,
  epoch BIGINT NOT NULL, token BIGINT NOT NULL, highest_epoch BIGINT NOT NULL,
  highest_token BIGINT NOT NULL, verdict INT NOT NULL, PRIMARY KEY (resource, slot)
) ENGINE=InnoDB"""
OLDER_ENTERS = """INSERT INTO {} (resource, slot, name, epoch, token, highest_epoch, highest_token,
  verdict) VALUES ('{}', -1, 'lock', 0, 7, 0, 7, 0)"""


def test_a_table_of_an_older_version(connect: Connect) -> None:
    """It is told what to do, and then both versions can use it, side by side."""
    table, connection = f"fence_{secrets.token_hex(4)}", connect()
    ask(connection, OLDER.format(table))
    ask(connection, OLDER_ENTERS.format(table, "a"))
    connection.commit()
    for asked in (fence(8), fence(8, Mode.SHARED)):
        with pytest.raises(Unsupported, match=r"older version(.|\n)*sql\.create(.|\n)*ALTER TABLE"):
            sql.guard(connection, "a", asked, table=table)
        connection.rollback()
    for _ in range(2):
        sql.create(connection, table=table)
    connection.commit()
    ask(connection, OLDER_ENTERS.format(table, "b"))
    connection.commit()
    for resource in ("a", "b", "c"):
        sql.guard(connection, resource, fence(8), table=table)
        connection.commit()
        with pytest.raises(StaleFence):
            sql.guard(connection, resource, fence(7), table=table)
        connection.rollback()


def test_an_account_without_rights_is_told_which(servers: Servers, url: str, stock: str) -> None:
    """A reader's account: what it lacks, and what would make the table."""
    with open_admin(servers.of(MySQLServer)) as admin:
        ask(admin, f"CREATE USER {stock} IDENTIFIED BY 'secret'")
        ask(admin, f"GRANT SELECT ON holdfast.* TO {stock}")
    with pymysql.connect(**mysql_settings(url) | {"user": stock}) as connection:
        with pytest.raises(Unsupported, match="GRANT SELECT, INSERT, UPDATE, DELETE ON holdfast_f"):
            sql.guard(connection, stock, fence(1))
        connection.rollback()
        with pytest.raises(Unsupported, match=r"can't make it(.|\n)*CREATE TABLE(.|\n)*GRANT"):
            sql.create(connection, table="nowhere")


@pytest.mark.parametrize("begun", [False, True])
def test_a_refused_lock_leaves_no_row(connect: Connect, stock: str, begun: bool) -> None:
    """Also if its caller goes on and commits: it would be let in the next time."""
    connection = connect()
    sql.guard(connection, stock, fence(5, Mode.SLOTS, 0))
    connection.commit()
    for asked in [fence(9), fence(9, name="another"), fence(9, Mode.SLOTS, 1, name="another")] * 2:
        if begun:
            connection.begin()
        with pytest.raises(StaleFence):
            sql.guard(connection, stock, asked)
        connection.commit()
    rows = ask(connection, f"SELECT slot, name FROM holdfast_fence WHERE resource = '{stock}'")
    assert rows == ((0, b"lock"),)


BEGINNINGS = {
    "consistent snapshot": ["START TRANSACTION WITH CONSISTENT SNAPSHOT"],
    "read elsewhere": ["SELECT * FROM holdfast_fence LIMIT 1"],
    "begun and read": ["BEGIN", "SELECT * FROM holdfast_fence LIMIT 1"],
}


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("begins", BEGINNINGS)
def test_a_transaction_that_has_read_before_is_refused(
    connect: Connect, stock: str, begins: str, new: bool
) -> None:
    """It would see, and write on from, what was there before another holder wrote."""
    first, second = connect(), connect()
    if not new:
        sell(first, stock, fence(32))
    for text in BEGINNINGS[begins]:
        ask(second, text)
    sell(first, stock, fence(33))
    with pytest.raises(Unsupported, match=f"{stock!r} can't be guarded.*read before.*Roll back"):
        sell(second, stock, fence(34))
    second.rollback()
    sell(second, stock, fence(34))
    assert ask(first, f"SELECT n FROM {stock}") == (((8 if new else 7),),)


@pytest.mark.parametrize("begins", BEGINNINGS)
def test_one_that_has_read_nothing_newer_is_let_in(
    connect: Connect, stock: str, begins: str
) -> None:
    """Nobody has entered since: it sees all that holders wrote."""
    first, second = connect(), connect()
    sell(first, stock, fence(33))
    for text in BEGINNINGS[begins]:
        ask(second, text)
    sell(second, stock, fence(34))
    assert ask(first, f"SELECT n FROM {stock}") == ((8,),)


@pytest.mark.parametrize("begins", [[], ["BEGIN"], ["BEGIN", "DO 0"]])
def test_one_that_waited_for_the_holder_before_it_sees_what_that_wrote(
    connect: Connect, stock: str, begins: list[str]
) -> None:
    """What was begun but has not read sees what is there once it was let in."""
    first, second = connect(), connect()
    sell(first, stock, fence(32))
    sql.guard(first, stock, fence(33))
    ask(first, f"UPDATE {stock} SET n = n - 1")
    for text in begins:
        ask(second, text)
    beside = Beside(second, connect(), lambda: sell(second, stock, fence(34)))
    first.commit()
    assert beside.join() is None
    assert ask(first, f"SELECT n FROM {stock}") == ((7,),)


def test_read_committed_sees_what_is_there(connect: Connect, stock: str) -> None:
    first, second = connect(), connect()
    ask(second, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    second.begin()
    ask(second, f"SELECT n FROM {stock}")
    sell(first, stock, fence(33))
    sell(second, stock, fence(34))
    assert ask(first, f"SELECT n FROM {stock}") == ((8,),)


def test_a_returning_reader_that_has_read_before_is_refused(connect: Connect, stock: str) -> None:
    first, second, reader = connect(), connect(), connect()
    ask(second, f"SELECT n FROM {stock}")
    sell(first, stock, fence(33))
    sql.guard(reader, stock, fence(34, Mode.SHARED))
    reader.commit()
    with pytest.raises(Unsupported, match="read before"):
        sql.guard(second, stock, fence(34, Mode.SHARED))
    second.rollback()
    sql.guard(second, stock, fence(34, Mode.SHARED))
    assert ask(second, f"SELECT n FROM {stock}") == ((9,),)


def test_the_second_of_two_slots_is_looked_at_too(connect: Connect, stock: str) -> None:
    """The first one's row may have been new, and was read then."""
    first, second = connect(), connect()
    sql.guard(first, stock, fence(33, Mode.SLOTS, 1))
    first.commit()
    sql.guard(first, stock, fence(33, Mode.SLOTS, 1))
    ask(first, f"UPDATE {stock} SET n = 9")
    both = fence(34, Mode.SLOTS, 0, 1)
    beside = Beside(second, connect(), lambda: sql.guard(second, stock, both))
    first.commit()
    assert isinstance(beside.join(), Unsupported)


def test_on_asyncio_and_under_sqlalchemy(url: str, connect: Connect, stock: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    writer = connect()
    read = f"SELECT n FROM {stock}"

    async def on_asyncmy() -> None:
        async with asyncmy.connect(**mysql_settings(url)) as connection:
            async with connection.cursor() as cursor:
                await cursor.execute(read)
            sell(writer, stock, fence(41))
            with pytest.raises(Unsupported, match="read before"):
                await sql.guard(connection, stock, fence(42))
            await connection.rollback()
            await sql.guard(connection, stock, fence(42))
            await connection.commit()

    async def on_an_engine() -> None:
        engine = create_async_engine(url.replace("mysql://", "mysql+asyncmy://"))
        async with engine.connect() as connection:
            await connection.execute(sqlalchemy.text(read))
            sell(writer, stock, fence(43))
            with pytest.raises(Unsupported, match="read before"):
                await sql.guard(connection, stock, fence(44))
            await connection.rollback()
            await sql.guard(connection, stock, fence(44))
            await connection.commit()
        await engine.dispose()

    asyncio.run(on_asyncmy())
    asyncio.run(on_an_engine())
    engine = sqlalchemy.create_engine(url.replace("mysql://", "mysql+pymysql://"))
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(read))
        sell(writer, stock, fence(45))
        with pytest.raises(Unsupported, match="read before"):
            sql.guard(connection, stock, fence(46))
        connection.rollback()
        sql.guard(connection, stock, fence(46))
        connection.commit()
    engine.dispose()


def test_a_rollback_of_the_first_that_entered_lets_all_others_in(
    servers: Servers, connect: Connect, stock: str
) -> None:
    """They wait to insert a row that vanishes: InnoDB rolls back all of them but one, and the
    guard, which was all that was in their transactions, is repeated."""
    entered: list[str] = []

    def wait(connection: Any) -> None:
        sql.guard(connection, stock, fence(7))
        connection.commit()
        entered.append(stock)

    def waiting() -> bool:
        with open_admin(servers.of(MySQLServer)) as admin, admin.cursor() as cursor:
            text = "SELECT COUNT(*) FROM information_schema.innodb_trx"
            cursor.execute(f"{text} WHERE trx_state = 'LOCK WAIT'")
            return bool(cursor.fetchone()[0] >= len(threads))

    first = connect()
    sql.guard(first, stock, fence(7))
    threads = [threading.Thread(target=wait, args=(connect(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until("all to wait for the row", waiting)
    first.rollback()
    for thread in threads:
        thread.join(60)
    assert len(entered) == len(threads)
