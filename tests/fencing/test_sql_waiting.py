"""The row of a resource stays locked until the transaction ends: who comes meanwhile waits."""

from __future__ import annotations

import psycopg
import pytest

from fencing.databases import Beside, Connect, fence, ready
from holdfast import Mode, StaleFence
from holdfast.fencing import sql
from servers.postgres import PostgresServer
from servers.registry import Servers


def test_the_row_is_held_until_the_end(connect: Connect) -> None:
    """A stale holder that comes while a fresh one works waits, and is then refused."""
    fresh, stale = ready(connect), connect()
    sql.guard(fresh, "r", fence(2))
    late = Beside(stale, connect(), lambda: sql.guard(stale, "r", fence(1)))
    fresh.commit()
    assert isinstance(late.join(), StaleFence)
    stale.rollback()


def test_a_fresh_holder_waits_for_a_stale_ones_transaction(connect: Connect) -> None:
    """What the stale one had begun is whole and committed before the fresh one reads."""
    stale, fresh = ready(connect), connect()
    stale.cursor().execute("DROP TABLE IF EXISTS log")
    stale.cursor().execute("CREATE TABLE log (word VARCHAR(20))")
    stale.commit()
    sql.guard(stale, "r", fence(1))

    def enter_and_read() -> int:
        sql.guard(fresh, "r", fence(2))
        cursor = fresh.cursor()
        cursor.execute("SELECT COUNT(*) FROM log")
        seen = int(cursor.fetchone()[0])
        fresh.commit()
        return seen

    later = Beside(fresh, connect(), enter_and_read)
    stale.cursor().execute("INSERT INTO log VALUES ('stale')")
    assert not later.outcome
    stale.commit()
    assert later.join() == 1


@pytest.mark.parametrize("connect", ["postgresql", "mysql"], indirect=True)
def test_a_reader_that_comes_again_keeps_writers_out(connect: Connect) -> None:
    """Beside other readers, but a writer waits until its transaction ends. In SQLite a writer's
    commit waits, by itself."""
    reader, writer = ready(connect), connect()
    for _ in range(2):  # only the second time it shares the row
        reader.commit()
        sql.guard(reader, "r", fence(4, Mode.SHARED))
    later = Beside(writer, connect(), lambda: sql.guard(writer, "r", fence(5)))
    reader.commit()
    assert later.join() is None
    writer.rollback()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_stricter_isolation(servers: Servers, level: str) -> None:
    """Who waited behind another's entry gets the database's own error, never a stale read."""
    url = servers.of(PostgresServer).url
    with (
        psycopg.connect(url) as fresh,
        psycopg.connect(url) as stale,
        psycopg.connect(url) as watcher,
    ):
        fresh.execute("DROP TABLE IF EXISTS holdfast_fence")
        sql.create(fresh)
        sql.guard(fresh, "r", fence(1))
        fresh.commit()
        sql.guard(fresh, "r", fence(3))
        stale.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        late = Beside(stale, watcher, lambda: sql.guard(stale, "r", fence(2)))
        fresh.commit()
        assert isinstance(late.join(), StaleFence | psycopg.errors.SerializationFailure)
        stale.rollback()
