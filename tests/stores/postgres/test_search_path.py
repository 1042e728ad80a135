"""Our SQL looks nothing up by a role's search_path: functions of other roles never run."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterator

import psycopg
import pytest

import holdfast
from holdfast.errors import Incompatible, Unsupported
from holdfast.sql import transaction_lock
from holdfast.stores.postgres.schema import REVISION, schema_sql
from holdfast.testing import Flavour
from holdfast.testing.clients import open_client
from holdfast.testing.workers import Workers
from servers.postgres import PgBouncer, PostgresServer
from stores.postgres import helpers
from stores.postgres.helpers import Admin
from stores.postgres.test_postgres import one
from stores.sql_helpers import wait_for_waiters

admin = helpers.admin

_TABLE = """
CREATE SCHEMA planted;
CREATE TABLE planted.ran (what text);
CREATE FUNCTION planted.note(what text) RETURNS void LANGUAGE sql AS
  'INSERT INTO planted.ran VALUES (what)'"""
_FUNCTIONS = """
SELECT p.proname, oidvectortypes(p.proargtypes), p.prorettype::regtype::text, p.pronargs
FROM pg_proc p WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f'
  AND NOT p.proretset AND p.provariadic = 0 AND p.proname = ANY (%s)
  AND NOT EXISTS (SELECT FROM unnest(p.proargtypes || p.prorettype) a JOIN pg_type t ON t.oid = a
    WHERE t.typtype = 'p' AND t.typname <> 'void')"""
_OPERATORS = """
SELECT o.oprname, o.oprleft::regtype::text, o.oprright::regtype::text, o.oprresult::regtype::text
FROM pg_operator o WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND o.oprkind = 'b'
  AND o.oprcode <> 0 AND o.oprleft = ANY (%s::regtype[]) AND o.oprright = ANY (%s::regtype[])"""
_TYPES = [
    "boolean", "integer", "bigint", "text", "numeric", "double precision", "oid", "name", "json",
    "interval", "timestamp with time zone", "inet", "xid",
]  # fmt: skip
_POLYMORPHIC = [
    # The own versions take any array, or any number of values: these match better.
    ("array_to_string", "integer[], text", "text", 2),
    ("array_to_string", "bigint[], text", "text", 2),
    ("json_build_array", "text, text, numeric, integer", "json", 4),
    ("json_build_array", "text, text, bigint, integer[], numeric, numeric", "json", 6),
    ("json_build_object", ", ".join(["text"] * 2), "json", 2),
]


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of its own: other tests would run the planted functions, too."""
    with PostgresServer() as made:
        yield made


def plant(admin: Admin) -> None:
    """Makes every new session find another role's functions and operators first: one for each of
    the server's own that our requests use, and some whose types match better."""
    admin.execute(_TABLE)
    used = sorted(set(re.findall(r"\b([a-z_]+)\(", schema_sql())) | {"pg_cancel_backend"})
    found = [*admin.execute(_FUNCTIONS, (used,)).fetchall(), *_POLYMORPHIC]
    assert len(found) > 40
    for name, types, answer, count in found:
        given = ", ".join(f"${number + 1}" for number in range(int(str(count))))
        _plant_function(admin, f"{name}({types})", str(answer), f'pg_catalog."{name}"({given})')
    signs = admin.execute(_OPERATORS, (_TYPES, _TYPES)).fetchall()
    assert len(signs) > 100
    for number, (sign, left, right, answer) in enumerate(signs):
        name, call = f"sign_{number}({left}, {right})", f"$1 OPERATOR(pg_catalog.{sign}) $2"
        _plant_function(admin, name, str(answer), call, str(sign))
        made = f"LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = planted.sign_{number}"
        admin.execute(f"CREATE OPERATOR planted.{sign} ({made})".encode())
    admin.execute("ALTER ROLE holdfast SET search_path = planted, public, pg_catalog")


def _plant_function(admin: Admin, name: str, answer: str, call: str, what: str = "") -> None:
    does = f"PERFORM {call};" if answer == "void" else f"RETURN {call};"
    note = f"PERFORM planted.note('{what or name}');"
    made = f"CREATE FUNCTION planted.{name} RETURNS {answer} LANGUAGE plpgsql"
    admin.execute(f"{made} AS $body$ BEGIN {note} {does} END $body$".encode())


def ran(admin: Admin) -> list[str]:
    return sorted(str(row[0]) for row in admin.execute("SELECT DISTINCT what FROM planted.ran"))


async def everything(url: str, flavour: Flavour, workers: Workers) -> None:
    """Sends every kind of request that clients have."""
    ours = open_client(url, flavour, workers.run, timeout=60)
    theirs = open_client(url, flavour, workers.run, timeout=60)
    async with ours, theirs:
        await ours.check()
        async with ours.lock("name", note="x") as lease:
            waiting = asyncio.create_task(theirs.lock("name").acquire())
            await wait_for_waiters(ours)
            await lease.extend(40)
        taken = await waiting
        assert taken is not None
        assert [each.name for each in await ours.list("na")] == ["name"]
        assert await ours.break_lock("name", reason="a test") == taken.token
        await taken.release()
        async with ours.rwlock("read").read(), theirs.rwlock("read").read():
            pass
        async with ours.semaphore("slots", 2), theirs.semaphore("slots", 2):
            assert await ours.semaphore("slots", 2).acquire(timeout=0.2) is None
        assert (await ours.once("job").run(lambda: 1)).value == 1
        assert (await theirs.once("job").run(lambda: 2)).value == 1


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("way", ["lease", "advisory", "pooler"])
def test_what_is_on_the_search_path_never_runs(
    server: PostgresServer, admin: Admin, way: str, flavour: Flavour
) -> None:
    """Neither when the schema is made, nor by any request, nor through a pooler, whose sessions we
    can't configure."""
    plant(admin)
    workers = Workers()
    try:
        if way == "pooler":
            with PgBouncer(server, pool=2) as pooler:
                asyncio.run(everything(pooler.url, flavour, workers))
        else:
            asyncio.run(everything(f"{server.url}?mode={way}", flavour, workers))
    finally:
        workers.close()
    assert ran(admin) == []


def test_transaction_lock_runs_nothing_from_the_search_path(
    server: PostgresServer, admin: Admin
) -> None:
    admin.execute(schema_sql().encode())
    plant(admin)
    with psycopg.connect(server.url) as first, psycopg.connect(server.url) as second:
        token = transaction_lock(first, "name").token
        with pytest.raises(holdfast.LockTimeout):
            transaction_lock(second, "name", timeout=0.1)
        first.commit()
        assert transaction_lock(second, "name", timeout=5).token > token
    assert ran(admin) == []


_UNSAFE = """
SELECT count(*) FROM pg_proc p WHERE p.pronamespace = %s::regnamespace AND p.prokind = 'f'
  AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (p.proconfig), false)"""


def make_older(admin: Admin, schema: str) -> None:
    """Makes the schema as the previous version does: functions without a search_path."""
    rows = admin.execute(
        "SELECT p.oid::regprocedure::text FROM pg_proc p"
        " WHERE p.pronamespace = %s::regnamespace AND p.prokind = 'f'",
        (schema,),
    ).fetchall()
    for (function,) in rows:
        admin.execute(f"ALTER FUNCTION {function} RESET ALL".encode())
    admin.execute(
        f"""CREATE OR REPLACE FUNCTION "{schema}".enter(ns text, md text, ver integer)
        RETURNS text LANGUAGE sql AS $$ SELECT '{REVISION - 1} 1 lease' $$""".encode()
    )
    assert one(admin, _UNSAFE, schema) == len(rows)


def test_functions_of_an_older_version_are_replaced(server: PostgresServer, admin: Admin) -> None:
    """By the first connection of a role that may; for another role the error has the SQL."""
    schema, role = f"s{secrets.token_hex(4)}", f"r{secrets.token_hex(4)}"
    admin.execute(schema_sql(schema=schema).encode())
    assert one(admin, _UNSAFE, schema) == 0
    url = f"{server.url}?schema={schema}"
    with holdfast.connect(url) as locks:
        locks.list()
    make_older(admin, schema)
    other = holdfast.connect(f"{url}&mode=advisory")
    with other, pytest.raises(Incompatible, match="lease mode"):
        other.lock("name").acquire(timeout=5)
    assert one(admin, _UNSAFE, schema) != 0  # one that may not use them does not replace them
    with holdfast.connect(url) as locks, locks.lock("name"):
        assert one(admin, _UNSAFE, schema) == 0
    make_older(admin, schema)
    admin.execute(f"CREATE ROLE {role} LOGIN".encode())
    admin.execute(f"GRANT USAGE ON SCHEMA {schema} TO {role}".encode())
    rights = "SELECT, INSERT, UPDATE, DELETE"
    admin.execute(f"GRANT {rights} ON ALL TABLES IN SCHEMA {schema} TO {role}".encode())
    with holdfast.connect(url.replace("//holdfast@", f"//{role}@")) as humble:
        with pytest.raises(Unsupported, match="older than this version"):
            humble.lock("name").acquire(timeout=5)
        admin.execute(schema_sql(schema=schema).encode())
        with humble.lock("name", timeout=5) as lease:
            assert lease.held


def test_the_schema_leaves_the_search_path_as_it_was(server: PostgresServer, admin: Admin) -> None:
    """The session that runs it can be used afterwards."""
    admin.execute("SET search_path = public, pg_catalog")
    admin.execute(schema_sql().encode())
    assert one(admin, "SHOW search_path") == "public, pg_catalog"


@pytest.mark.parametrize("granted", [True, False])
def test_check_warns_if_every_role_may_create_in_the_schema(
    server: PostgresServer, admin: Admin, granted: bool
) -> None:
    """Such a role could add functions that run in place of ours."""
    with holdfast.connect(server.url) as locks:
        locks.list()  # makes the tables
        if granted:
            admin.execute("GRANT CREATE ON SCHEMA holdfast TO PUBLIC")
        found = {finding.subject: finding for finding in locks.check()}
    assert (found["schema"].level == "warning") == granted
