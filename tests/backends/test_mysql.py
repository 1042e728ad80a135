"""What is peculiar to lease rows on MySQL: the schema, rights, round trips, calls, restarts."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import pymysql
import pytest

import holdfast
from holdfast.backends.mysql_schema import TABLES, schema_sql
from holdfast.claim import Busy, Claim, Grant, Mode, write_label
from holdfast.core.contract import Backend, Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, Incompatible, Unsupported
from holdfast.runtimes.blocking import BlockingRuntime
from holdfast.url import open_store
from servers.mysql import MySQLServer
from servers.proxy import Proxy
from servers.registry import Servers
from servers.tls import make_certificate

Admin = Any
NAMES = ("name", "Name", "namé", "name ", "nam\N{LATIN SMALL LETTER E}\N{COMBINING ACUTE ACCENT}")


@pytest.fixture
def server(servers: Servers) -> MySQLServer:
    return servers.of(MySQLServer)


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


def open_admin(server: MySQLServer) -> Admin:
    """Over the socket, as the one who may do everything."""
    return pymysql.connect(
        unix_socket=str(server.folder / "mysql.sock"),
        user="root",
        database="holdfast",
        autocommit=True,
        client_flag=pymysql.constants.CLIENT.MULTI_STATEMENTS,
    )


@pytest.fixture
def admin(server: MySQLServer) -> Iterator[Admin]:
    with open_admin(server) as connection:
        yield connection


def rows(admin: Admin, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
    with admin.cursor() as cursor:
        cursor.execute(sql, parameters or None)
        found = list(cursor.fetchall())
        while cursor.nextset():
            pass
        return found


def account(server: MySQLServer, admin: Admin, rights: str = "", on: str = "") -> str:
    """A URL with an account of its own: its connections can be told from all others."""
    name = f"u{secrets.token_hex(4)}"
    rows(admin, f"CREATE USER '{name}'@'%' IDENTIFIED BY 'secret'")
    rows(admin, f"GRANT {rights or 'ALL'} ON {on or 'holdfast.*'} TO '{name}'@'%'")
    return server.url.replace("//holdfast:", f"//{name}:")


def sessions(admin: Admin, url: str, like: str = "%") -> list[int]:
    sql = "SELECT id FROM information_schema.processlist WHERE user = %s AND"
    sql += " COALESCE(info, '') LIKE %s"
    return [row[0] for row in rows(admin, sql, urlsplit(url).username, like)]


def wait_for(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come")


def claim(name: str = "name", ttl: float = 30.0, mode: Mode = Mode.EXCLUSIVE) -> Claim:
    label = write_label("host", 1, "thread", "")
    return Claim(name, mode, 1, 0, ttl, secrets.token_hex(16), label)


def backend_of(url: str, namespace: str) -> Backend:
    return open_store(url, Settings(namespace=namespace)).backend(BlockingRuntime())


def taken(backend: Backend, asked: Claim) -> Grant:
    answer = run_now(backend.attempt(asked, join=True))
    assert isinstance(answer, Grant)
    return answer


def test_the_schema_can_be_made_by_hand_and_again(server: MySQLServer, admin: Admin) -> None:
    """``schema_sql`` is idempotent, keeps what is there, and is all that a door needs."""
    prefix = f"p{secrets.token_hex(4)}_"
    rows(admin, schema_sql(prefix=prefix))
    with holdfast.connect(f"{server.url}?prefix={prefix}") as locks, locks.lock("kept") as lease:
        rows(admin, schema_sql(prefix=prefix))
        assert rows(admin, f"SELECT token FROM {prefix}lock") == [(lease.token,)]
        assert lease.held
    tables = rows(admin, "SHOW TABLES LIKE %s", f"{prefix.removesuffix('_')}\\_%")
    assert {row[0] for row in tables} == {prefix + table for table in TABLES}


def test_many_create_the_schema_at_once(server: MySQLServer, namespace: str) -> None:
    """Many first connections make one schema."""
    url = f"{server.url}?prefix=p{secrets.token_hex(4)}_"
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
    "option", ["prefix=a-b", "prefix=x;drop", "prefix=A", "mode=x", "ssl_mode=maybe", "other=1"]
)
def test_options_are_checked(server: MySQLServer, option: str) -> None:
    """What can't be escaped into trouble is refused when the door is made."""
    with pytest.raises(ValueError, match=option.split("=", maxsplit=1)[0]):
        holdfast.connect(f"{server.url}?{option}")


def test_a_url_without_a_database_is_refused() -> None:
    """There is no place to put the tables."""
    with pytest.raises(ValueError, match="needs a database"):
        holdfast.connect("mysql://user@host")


def test_missing_rights_are_told_with_the_sql(server: MySQLServer, admin: Admin) -> None:
    """An account that may not create tables says what is to be run; once it was run, it works."""
    prefix = f"p{secrets.token_hex(4)}_"
    url = account(server, admin, "SELECT, INSERT, UPDATE, DELETE") + f"?prefix={prefix}"
    locks = holdfast.connect(url, patience=5)
    with pytest.raises(Unsupported, match="holdfast schema mysql") as told:
        locks.lock("name").acquire()
    assert f"CREATE TABLE IF NOT EXISTS `{prefix}lock`" in str(told.value)
    rows(admin, schema_sql(prefix=prefix))
    with locks.lock("name") as lease, holdfast.connect(url) as other:
        assert other.lock("name").acquire(timeout=0.2) is None  # waiting needs no more rights
        assert lease.held
    locks.close()


def test_tables_without_transactions_are_refused(server: MySQLServer, admin: Admin) -> None:
    """A DBA's default engine is not ours."""
    prefix = f"p{secrets.token_hex(4)}_"
    rows(admin, schema_sql(prefix=prefix).replace("InnoDB ROW_FORMAT=DYNAMIC", "Aria"))
    locks = holdfast.connect(f"{server.url}?prefix={prefix}")
    with pytest.raises(Unsupported, match="InnoDB is needed"):
        locks.lock("name").acquire(timeout=0)
    locks.close()


def test_other_protocols_are_refused(server: MySQLServer, admin: Admin, namespace: str) -> None:
    """A namespace of a later version, or of the other mode, is not shared."""
    with holdfast.connect(server.url, namespace=namespace) as locks, locks.lock("name"):
        pass
    advisory = holdfast.connect(f"{server.url}?mode=advisory", namespace=namespace)
    with pytest.raises(Incompatible, match="lease mode"):
        advisory.lock("name").acquire(timeout=0)
    advisory.close()
    rows(admin, "UPDATE holdfast_protocol SET version = 99 WHERE namespace = %s", namespace)
    newer = holdfast.connect(server.url, namespace=namespace)
    with pytest.raises(Incompatible, match="protocol 99"):
        newer.lock("name").acquire(timeout=0)
    newer.close()


@pytest.mark.parametrize("suffix", ["", "?mode=advisory"])
def test_a_hold_is_two_round_trips(server: MySQLServer, namespace: str, suffix: str) -> None:
    """One to acquire with its token, one to release, in both modes."""
    proxy = Proxy(server)
    backend = backend_of(proxy.url + suffix, namespace)
    try:
        run_now(backend.release(taken(backend, claim("warm"))))
        proxy.reset_counts()
        for number in range(10):
            grant = taken(backend, claim(f"name {number}"))
            assert run_now(backend.release(grant))
        assert (proxy.counts.connections, proxy.counts.requests) == (0, 20)
    finally:
        run_now(backend.close())
        proxy.close()


@pytest.mark.parametrize("suffix", ["", "?mode=advisory"])
def test_names_are_bytes(server: MySQLServer, namespace: str, suffix: str) -> None:
    """Case, accents and a trailing blank count; 512 bytes fit."""
    names = (*NAMES, "n" * 512, "é" * 256)
    url = server.url + suffix
    with (
        holdfast.connect(url, namespace=namespace) as locks,
        holdfast.connect(url, namespace=namespace) as others,
        ExitStack() as held,
    ):
        for name in names:
            held.enter_context(locks.lock(name, timeout=0))
        for name in names:
            assert others.lock(name).acquire(timeout=0) is None
        assert {standing.name for standing in others.list()} == set(names)


def test_many_waiters_share_a_few_connections(
    server: MySQLServer, admin: Admin, namespace: str
) -> None:
    """200 threads on 20 names wait over at most six connections, and all are served."""
    url = account(server, admin)
    locks = holdfast.connect(url, namespace=namespace)
    served: list[int] = []

    def work(number: int) -> None:
        lease = locks.lock(f"name {number % 20}").acquire(timeout=60)
        assert lease is not None
        served.append(lease.token)
        lease.release()

    holds = [locks.lock(f"name {number}").acquire() for number in range(20)]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    crowded = "SELECT COUNT(*) FROM holdfast_lock WHERE namespace = %s AND crowd <> ''"
    wait_for(lambda: rows(admin, crowded, namespace) == [(20,)])
    most = len(sessions(admin, url))
    for hold in holds:
        assert hold is not None
        hold.release()
    while any(thread.is_alive() for thread in threads):
        most = max(most, len(sessions(admin, url)))
        threading.Event().wait(0.01)
    locks.close()
    assert len(served) == 200
    assert most <= 6


def test_a_bell_that_is_killed_is_replaced(
    server: MySQLServer, admin: Admin, namespace: str
) -> None:
    """KILL on everything of a waiter's: it is still called by the release."""
    holder = holdfast.connect(server.url, namespace=namespace)
    url = account(server, admin)
    waiter = holdfast.connect(url, namespace=namespace)
    lease = holder.lock("name").acquire()
    assert lease is not None
    tokens: list[int] = []

    def wait() -> None:
        with waiter.lock("name", timeout=60) as got:
            tokens.append(got.token)

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(2):
        wait_for(lambda: sessions(admin, url, "DO IF%"))
        for number in sessions(admin, url):
            with suppress(pymysql.MySQLError):
                rows(admin, f"KILL {number}")
    wait_for(lambda: sessions(admin, url, "DO IF%"))
    lease.release()
    thread.join(60)
    assert tokens[0] > lease.token
    holder.close()
    waiter.close()


def test_killed_connections_lose_no_lease(
    server: MySQLServer, admin: Admin, namespace: str
) -> None:
    """KILL on a holder's connections: rows do not end with connections."""
    url = account(server, admin)
    locks = holdfast.connect(url, namespace=namespace)
    lease = locks.lock("name", ttl=30).acquire()
    assert lease is not None
    killed = sessions(admin, url)
    for number in killed:
        rows(admin, f"KILL {number}")
    assert killed
    lease.extend()
    assert lease.held
    assert lease.release() is True
    locks.close()


def test_a_waiter_whose_session_is_gone_is_skipped_at_once(
    server: MySQLServer, admin: Admin, namespace: str
) -> None:
    """The server knows who still listens: nobody waits for the grace of the dead."""
    first, holder = backend_of(server.url, namespace), backend_of(server.url, namespace)
    third = backend_of(server.url, namespace)
    grant = taken(holder, claim())
    for backend, asked in ((first, claim()), (third, claim())):
        for _ in range(2):  # the second attempt tells of the bell that the first wait hung
            busy = run_now(backend.attempt(asked, join=True))
            assert isinstance(busy, Busy)
            run_now(backend.wait(asked, busy, 0.0))
    run_now(first.close())
    bell = first.listening.bell  # type: ignore[attr-defined]
    wait_for(lambda: rows(admin, f"SELECT IS_USED_LOCK('hf:bell:{bell}')") == [(None,)])
    assert run_now(holder.release(grant))
    assert len(run_now(holder.look("name")).waiters) == 1
    assert isinstance(taken(third, asked), Grant)
    for backend in (holder, third):
        run_now(backend.close())


def test_tokens_grow_across_crashes_of_the_server(servers: Servers, namespace: str) -> None:
    """kill -9 right after a grant, twenty times: every token is above the one before."""
    server = servers.of(MySQLServer, arguments=("--innodb-log-file-size=16M",))
    tokens: list[int] = []
    for _ in range(20):
        with holdfast.connect(server.url, namespace=namespace, patience=30) as locks:
            lease = locks.lock("name", ttl=0.2, renew=False).acquire(timeout=60)
            assert lease is not None
            tokens.append(lease.token)
            server.kill()
            lease.release()
        server.start()
    assert tokens == sorted(set(tokens))


def test_a_hold_outlives_a_restart(servers: Servers, namespace: str) -> None:
    """The row is still there, and so is the one who waits for it."""
    server = servers.of(MySQLServer, arguments=("--innodb-log-file-size=16M",))
    holder = holdfast.connect(server.url, namespace=namespace)
    waiter = holdfast.connect(server.url, namespace=namespace)
    lease = holder.lock("name", ttl=60).acquire()
    assert lease is not None
    tokens: list[int] = []

    def wait() -> None:
        with waiter.lock("name", timeout=60) as got:
            tokens.append(got.token)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: holder.inspect("name").waiters)
    server.kill()
    server.start()
    wait_for(lambda: holder.inspect("name").holders)
    assert lease.held
    assert lease.release() is True
    thread.join(60)
    assert tokens[0] > lease.token
    holder.close()
    waiter.close()


def test_a_child_uses_connections_of_its_own(server: MySQLServer, namespace: str) -> None:
    """After a fork the parent's hold stays, and the child waits like anybody else."""
    with holdfast.connect(server.url, namespace=namespace) as locks, locks.lock("name") as lease:
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                alone = locks.lock("name").acquire(timeout=0) is None
                with locks.lock("other", timeout=5):
                    os._exit(0 if alone else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        lease.extend()
        assert lease.held


def test_a_full_server_is_told(servers: Servers, namespace: str) -> None:
    """No connection left: an error that says so, and a lock as soon as there is one."""
    server = servers.of(
        MySQLServer, arguments=("--max-connections=10", "--extra-max-connections=1")
    )
    with open_admin(server) as admin:
        url = account(server, admin)
    with holdfast.connect(url, namespace=namespace) as first, first.lock("warm"):
        pass
    full: list[Admin] = []
    with suppress(pymysql.MySQLError):
        while len(full) < 20:
            full.append(open_admin(server))
    locks = holdfast.connect(url, namespace=namespace, patience=0.2)
    with pytest.raises(BackendUnavailable, match="Too many connections"):
        locks.lock("name").acquire()
    for connection in full:
        connection.close()
    with locks.lock("name", timeout=20) as lease:
        assert lease.held
    locks.close()


def test_a_read_only_server_is_told(servers: Servers, namespace: str) -> None:
    """Locks need the primary, also for an account that may write anywhere."""
    server = servers.of(MySQLServer, arguments=("--read-only=1",))
    locks = holdfast.connect(server.url, namespace=namespace, patience=0.2)
    with pytest.raises(BackendUnavailable, match="read-only replica"):
        locks.lock("name").acquire()
    locks.close()


def test_a_server_that_becomes_read_only_is_told(
    servers: Servers, admin: Admin, namespace: str
) -> None:
    """A failover under an open connection: the write is refused, and told."""
    server = servers.of(MySQLServer, arguments=("--innodb-log-file-size=24M",))
    with open_admin(server) as ours:
        url = account(server, ours)
        locks = holdfast.connect(url, namespace=namespace, patience=0.2)
        with locks.lock("name"):
            pass
        rows(ours, "SET GLOBAL read_only = 1")
        with pytest.raises(BackendUnavailable, match="read-only"):
            locks.lock("name").acquire()
        rows(ours, "SET GLOBAL read_only = 0")
        with locks.lock("name", timeout=10) as lease:
            assert lease.held
    locks.close()


def test_a_wrong_password_is_not_told(server: MySQLServer, namespace: str) -> None:
    """What fails at login names the server and no secret."""
    wrong = server.url.replace(":secret@", ":wrong-7261@")
    locks = holdfast.connect(wrong, namespace=namespace, patience=0.2)
    with pytest.raises(BackendUnavailable, match="Access denied") as told:
        locks.lock("name").acquire()
    assert "7261" not in str(told.value)
    assert "7261" not in repr(locks)
    locks.close()


class TlsServer(MySQLServer):
    """One that speaks TLS with a certificate of its own."""

    def __init__(self) -> None:
        super().__init__()
        made = make_certificate(self.folder)
        self.certificate = made.certificate
        self.arguments += [f"--ssl-cert={made.certificate}", f"--ssl-key={made.key}"]
        self.arguments += ["--require-secure-transport=1"]


@pytest.mark.parametrize("mode", ["lease", "advisory"])
def test_tls_is_verified(servers: Servers, namespace: str, mode: str) -> None:
    """Both worlds over TLS, waiting included; a stranger's certificate is refused."""
    server = servers.of(TlsServer)
    url = f"{server.url}?mode={mode}&ssl_ca={server.certificate}"
    with (
        holdfast.connect(url, namespace=namespace) as ours,
        holdfast.connect(url, namespace=namespace) as theirs,
    ):
        assert any(finding.detail == "TLS" for finding in ours.check())
        lease = ours.lock("name").acquire()
        assert lease is not None
        assert theirs.lock("name").acquire(timeout=0.3) is None

        async def body() -> None:
            async with holdfast.connect_async(url, namespace=namespace) as others:
                waiting = asyncio.create_task(others.lock("name").acquire(timeout=30))
                await asyncio.sleep(0.3)
                assert await asyncio.to_thread(lease.release)
                got = await waiting
                assert got is not None
                assert got.token > lease.token
                await got.release()

        asyncio.run(body())
    for suffix, cause in (("&ssl_mode=verify_identity", "certificate"), ("", "denied")):
        plain = f"{server.url}?mode={mode}{suffix}"
        stranger = holdfast.connect(plain, namespace=namespace, patience=0.2)
        with pytest.raises(BackendUnavailable, match=cause):
            stranger.lock("name").acquire()
        stranger.close()


def test_idle_names_are_purged(server: MySQLServer, admin: Admin, namespace: str) -> None:
    """Rows that nobody used for a week go; tokens still grow."""
    backend = backend_of(server.url, namespace)
    old = taken(backend, claim("old"))
    assert run_now(backend.release(old))
    held = taken(backend, claim("held", ttl=3600))
    age = "UPDATE holdfast_lock SET version = version - 8 * 86400 * 1000000 WHERE namespace = %s"
    rows(admin, age, namespace)
    young = taken(backend, claim("young"))
    backend._until_purge = 0  # type: ignore[attr-defined]
    assert run_now(backend.release(young))
    names = rows(admin, "SELECT name FROM holdfast_lock WHERE namespace = %s ORDER BY 1", namespace)
    assert names == [(b"held",), (b"young",)]
    assert run_now(backend.release(held))
    assert taken(backend, claim("old")).token > old.token
    run_now(backend.close())


def test_a_clock_that_steps_back_does_not_turn_tokens_back(
    server: MySQLServer, admin: Admin, namespace: str
) -> None:
    """The row remembers a token from the future, and the next one is above it."""
    with holdfast.connect(server.url, namespace=namespace) as locks:
        with locks.lock("name"):
            pass
        future = 2**62
        rows(admin, "UPDATE holdfast_lock SET token = %s WHERE namespace = %s", future, namespace)
        with locks.lock("name") as lease:
            assert lease.token == future + 1
        with locks.rwlock("name").read() as lease:
            assert lease.token == future + 2


def test_a_cancelled_request_leaves_its_wire_usable(server: MySQLServer, namespace: str) -> None:
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
                standing = await locks.inspect("name")
                assert [holder.token for holder in standing.holders] == [lease.token]
                assert standing.waiters == ()

    asyncio.run(body())
