"""What is specific to PostgreSQL: the schema, rights, round trips, connections."""

from __future__ import annotations

import asyncio
import secrets
import threading
from contextlib import suppress

import pytest

import holdfast
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, Incompatible, Unsupported
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.postgres.schema import schema_sql
from holdfast.url import open_store
from servers.postgres import PostgresServer
from servers.proxy import Proxy
from servers.registry import Servers
from stores.claims import claim_of
from stores.postgres import helpers
from stores.postgres.helpers import Admin

server, admin = helpers.server, helpers.admin


def one(admin: Admin, sql: str, *parameters: object) -> object:
    row = admin.execute(sql.encode(), parameters).fetchone()
    assert row is not None
    return row[0]


def test_the_schema_can_be_made_by_hand_and_again(server: PostgresServer, admin: Admin) -> None:
    """``schema_sql`` is idempotent, keeps existing rows, and is all that a client needs."""
    schema = f"s{secrets.token_hex(4)}"
    text = schema_sql(schema=schema, prefix="mine_").encode()
    admin.execute(text)
    url = f"{server.url}?schema={schema}&prefix=mine_"
    with holdfast.connect(url) as locks, locks.lock("kept") as lease:
        admin.execute(text)
        assert one(admin, f'SELECT token FROM "{schema}"."mine_lock"') == lease.token
        assert lease.held
    tables = "SELECT count(*) FROM information_schema.tables WHERE table_schema = %s"
    prefixed = tables + " AND table_name LIKE 'mine\\_%%'"
    assert one(admin, tables, schema) == one(admin, prefixed, schema)


def test_two_create_the_schema_at_once(server: PostgresServer, namespace: str) -> None:
    """Many first connections make one schema."""
    url = f"{server.url}?schema=s{secrets.token_hex(4)}"
    failures: list[BaseException] = []

    def first_use() -> None:
        try:
            with holdfast.connect(url, namespace=namespace) as locks, locks.lock("name"):
                pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=first_use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    "option", ["schema=a-b", "prefix=x;drop", 'schema="', "schema=A", "mode=x"]
)
def test_names_of_schemas_are_checked(server: PostgresServer, option: str) -> None:
    """A name that could need escaping is refused when the client is made."""
    with pytest.raises(ValueError, match=option.split("=", maxsplit=1)[0]):
        holdfast.connect(f"{server.url}?{option}")


def test_the_error_for_missing_rights_names_the_command(
    server: PostgresServer, admin: Admin
) -> None:
    """A role that may not create tables is told in a line what to run; after that it works."""
    role, schema = f"r{secrets.token_hex(4)}", f"s{secrets.token_hex(4)}"
    admin.execute(f"CREATE ROLE {role} LOGIN".encode())
    url = f"{server.url}?schema={schema}".replace("//holdfast@", f"//{role}@")
    locks = holdfast.connect(url, patience=5)
    with pytest.raises(Unsupported, match="holdfast schema postgresql") as caught:
        locks.lock("name").acquire()
    assert f"`holdfast schema postgresql --schema {schema} | psql …`" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    admin.execute(schema_sql(schema=schema).encode())
    with pytest.raises(Unsupported, match="USAGE on the schema"):
        locks.lock("name").acquire()
    admin.execute(f"GRANT USAGE ON SCHEMA {schema} TO {role}".encode())
    rights = "SELECT, INSERT, UPDATE, DELETE"
    admin.execute(f"GRANT {rights} ON ALL TABLES IN SCHEMA {schema} TO {role}".encode())
    with locks.lock("name") as lease:
        assert lease.held
    locks.close()


def test_other_protocols_are_refused(server: PostgresServer, admin: Admin, namespace: str) -> None:
    """A namespace of a later version, or of the other mode, is not shared."""
    with holdfast.connect(server.url, namespace=namespace) as locks, locks.lock("name"):
        pass
    advisory = holdfast.connect(f"{server.url}?mode=advisory", namespace=namespace)
    with pytest.raises(Incompatible, match="lease mode"):
        advisory.lock("name").acquire(timeout=0)
    advisory.close()
    later = "UPDATE holdfast.protocol SET version = 99 WHERE namespace = %s"
    admin.execute(later, (namespace,))
    newer = holdfast.connect(server.url, namespace=namespace)
    with pytest.raises(Incompatible, match="protocol 99"):
        newer.lock("name").acquire(timeout=0)
    newer.close()


@pytest.mark.parametrize("suffix", ["", "?mode=advisory"])
def test_a_hold_is_two_round_trips(server: PostgresServer, namespace: str, suffix: str) -> None:
    """One to acquire with its token, one to release, in both modes."""
    proxy = Proxy(server)
    store = open_store(proxy.url + suffix, Settings(namespace=namespace))
    backend = store.backend(BlockingRuntime())
    try:
        run_now(backend.release(run_now(backend.attempt(claim_of("warm"), join=True))))  # type: ignore[arg-type]
        proxy.reset_counts()
        for number in range(10):
            grant = run_now(backend.attempt(claim_of(f"name {number}"), join=True))
            assert run_now(backend.release(grant))  # type: ignore[arg-type]
        assert (proxy.counts.connections, proxy.counts.requests) == (0, 20)
    finally:
        run_now(backend.close())
        proxy.close()


def test_idle_names_are_purged(server: PostgresServer, admin: Admin, namespace: str) -> None:
    """Rows that were not used for a week are deleted, in bounded steps; tokens still grow."""
    with holdfast.connect(server.url, namespace=namespace) as locks:
        with locks.lock("old") as lease:
            old = lease.token
        with locks.lock("held", ttl=3600), locks.lock("young"):
            names = "SELECT array_agg(name ORDER BY name) FROM holdfast.lock WHERE namespace = %s"
            age = "UPDATE holdfast.lock SET used = used - interval '8 days' WHERE namespace = %s"
            admin.execute(age + " AND name <> 'young'", (namespace,))
            step = "SELECT holdfast.purge(%s, %s, %s)"
            assert one(admin, step, namespace, "", 2) == "old"
            assert one(admin, names, namespace) == ["held", "young"]
            assert one(admin, step, namespace, "old", 2) is None
            assert one(admin, names, namespace) == ["held", "young"]
        with locks.lock("old") as lease:
            assert lease.token > old


def test_tokens_grow_when_the_clock_steps_back(
    server: PostgresServer, admin: Admin, namespace: str
) -> None:
    """The row has a token from the future, and the next one is above it."""
    with holdfast.connect(server.url, namespace=namespace) as locks:
        with locks.lock("name"):
            pass
        future = 2**62
        ahead = "UPDATE holdfast.lock SET token = %s WHERE namespace = %s"
        admin.execute(ahead, (future, namespace))
        with locks.lock("name") as lease:
            assert lease.token == future + 1


def test_a_wrong_password_is_not_shown(servers: Servers, namespace: str) -> None:
    """The error of a failed login names the server and shows no secret."""
    server = servers.of(PostgresServer, password="right-7261")
    locks = holdfast.connect(
        server.url.replace("right-7261", "wrong-7261"), namespace=namespace, patience=0.2
    )
    with pytest.raises(BackendUnavailable, match="password authentication failed") as caught:
        locks.lock("name").acquire()
    assert "7261" not in str(caught.value)
    assert "7261" not in repr(locks)
    locks.close()
    with holdfast.connect(server.url, namespace=namespace) as right, right.lock("name") as lease:
        assert lease.held


def test_a_cancelled_request_leaves_its_connection_usable(
    server: PostgresServer, namespace: str
) -> None:
    """Acquires that are cancelled at any moment leave no hold, no entry, no broken connection."""

    async def body() -> None:
        async with holdfast.connect_async(server.url, namespace=namespace) as locks:
            for step in range(60):
                task = asyncio.create_task(locks.lock("name", timeout=5).acquire())
                await asyncio.sleep(step * 0.0002)
                task.cancel()
                lease = None
                with suppress(asyncio.CancelledError):
                    lease = await task
                if lease is not None:
                    await lease.release()
            async with locks.lock("name", timeout=10) as lease:
                info = await locks.inspect("name")
                assert [holder.token for holder in info.holders] == [lease.token]
                assert info.waiters == ()

    asyncio.run(body())
