"""PostgreSQL servers that crash, refuse, are read-only, or are behind a pooler."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest

import holdfast
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, LockLost, Unsupported
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.postgres.connection import first_value
from holdfast.stores.postgres_advisory.backend import PostgresAdvisoryBackend
from holdfast.url import open_store
from servers.account import account, give_to
from servers.postgres import USER, PgBouncer, PostgresServer, binary
from servers.proxy import Proxy
from stores.claims import claim_of
from stores.postgres import helpers
from stores.sql_deadline import gives_up_in_time

pytestmark = pytest.mark.faults

MODES = ["lease", "advisory"]
server = helpers.server


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that the test may kill."""
    with PostgresServer() as made:
        yield made


class Standby(PostgresServer):
    """A hot standby: a read-only replica of a primary."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__()
        self.primary = primary

    def prepare(self) -> None:
        self.data.rmdir()
        user = account(self.user)
        give_to(self.folder, user)
        words: list[str | Path] = [
            binary("pg_basebackup"),
            "-D",
            self.data,
            "-R",
            "-X",
            "stream",
            "-c",
            "fast",
        ]
        words += ["-h", self.primary.host, "-p", str(self.primary.port), "-U", USER]
        groups: list[str] | None = None if user is None else []
        subprocess.run(
            words, check=True, capture_output=True, user=user, group=user, extra_groups=groups,
            cwd="/",
        )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_tokens_grow_across_kills(own_server: PostgresServer, namespace: str, mode: str) -> None:
    """kill -9 of the server right after a grant, twenty times: each token is higher."""
    url = f"{own_server.url}?mode={mode}"
    tokens: list[int] = []
    for _ in range(20):
        locks = holdfast.connect(url, namespace=namespace, patience=60)
        lease = locks.lock("name", ttl=0.3, renew=False).acquire(timeout=60)
        assert lease is not None
        tokens.append(lease.token)
        own_server.kill()
        own_server.start()
        lease.release()
        locks.close()
    assert tokens == sorted(set(tokens))


def test_a_lease_survives_a_restart_of_its_server(
    own_server: PostgresServer, namespace: str
) -> None:
    """The server is killed and started again during a hold: the row is there, and is renewed."""
    with holdfast.connect(own_server.url, namespace=namespace) as locks:
        with locks.lock("name", ttl=30) as lease:
            own_server.kill()
            own_server.start()
            lease.extend()
            other = holdfast.connect(own_server.url, namespace=namespace)
            assert other.lock("name").acquire(timeout=0) is None
            other.close()
        with locks.lock("name") as again:
            assert again.token > lease.token


def test_a_session_ends_with_its_server(own_server: PostgresServer, namespace: str) -> None:
    """In advisory mode a hold is lost with the server, and its lease says so."""
    url = f"{own_server.url}?mode=advisory"
    with holdfast.connect(url, namespace=namespace) as locks:
        lease = locks.lock("name", ttl=30).acquire()
        assert lease is not None
        own_server.kill()
        own_server.start()
        with pytest.raises(LockLost):
            lease.extend()
        assert lease.lost
        with locks.lock("name") as again:
            assert again.token > lease.token


def test_a_pooler_of_transactions_is_refused_for_advisory_locks(
    server: PostgresServer, namespace: str
) -> None:
    """A lock would stay on a session of the pooler; a pooler in session mode is accepted."""
    for pool in (1, 20):
        with PgBouncer(server, pool=pool) as pooler:
            locks = holdfast.connect(f"{pooler.url}?mode=advisory", namespace=namespace)
            with pytest.raises(Unsupported, match="PgBouncer"):
                locks.lock("name").acquire()
            locks.close()
    with PgBouncer(server, mode="session") as pooler:
        locks = holdfast.connect(f"{pooler.url}?mode=advisory", namespace=namespace)
        with locks.lock("name", ttl=30) as lease:
            assert lease.held
            lease.extend()
        locks.close()


@pytest.mark.parametrize("mode", MODES)
def test_the_error_of_a_full_server(namespace: str, mode: str) -> None:
    """No connection is left: a clear error in time; it works once a connection is free."""
    settings = {"max_connections": "6", "superuser_reserved_connections": "0"}
    with PostgresServer(settings=settings) as small:
        others = [psycopg.connect(small.url) for _ in range(6)]
        locks = holdfast.connect(f"{small.url}?mode={mode}", namespace=namespace, patience=0.5)
        with pytest.raises(BackendUnavailable, match="too many clients"):
            locks.lock("name").acquire()
        for connection in others:
            connection.close()
        with locks.lock("name", timeout=20) as lease:
            assert lease.held
        locks.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_replica_is_refused_and_skipped(
    server: PostgresServer, namespace: str, mode: str
) -> None:
    """A read-only replica can't lock; of several hosts the primary is used."""
    with Standby(server) as standby:
        locks = holdfast.connect(f"{standby.url}?mode={mode}", namespace=namespace, patience=0.5)
        with pytest.raises(BackendUnavailable, match="read-only replica"):
            locks.lock("name").acquire()
        locks.close()
        hosts = f"{standby.host}:{standby.port},{server.host}:{server.port}"
        both = f"postgresql://{USER}@{hosts}/postgres?mode={mode}"
        with holdfast.connect(both, namespace=namespace) as able, able.lock("name") as lease:
            assert lease.held


@pytest.mark.parametrize("mode", MODES)
def test_a_fork_leaves_the_parent_s_hold_alone(
    server: PostgresServer, namespace: str, mode: str
) -> None:
    """The child holds nothing, disturbs nothing, and can lock by itself."""
    locks = holdfast.connect(f"{server.url}?mode={mode}", namespace=namespace)
    with locks, locks.lock("name", ttl=30) as lease:
        for _ in range(2):
            child = os.fork()
            if child == 0:
                _in_child(locks, lease)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        lease.extend()
        assert lease.held
        assert [h.token for h in locks.inspect("name").holders] == [lease.token]


def _in_child(locks: holdfast.Locks, lease: holdfast.Lease) -> NoReturn:
    code = 1
    try:
        free = locks.lock("name").acquire(timeout=0) is None
        with locks.lock("child's own") as own:
            code = 0 if free and own.held and lease.lost else 2
        locks.close()
    finally:
        os._exit(code)


def test_a_unix_socket_and_a_folder(server: PostgresServer, namespace: str) -> None:
    """``host`` may be the folder of the server's socket."""
    folder: Path = server.folder
    url = f"postgresql://{USER}@/postgres?host={folder}&port={server.port}"
    with holdfast.connect(url, namespace=namespace) as locks, locks.lock("name") as lease:
        assert lease.held


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "asyncio"])
@pytest.mark.parametrize("mode", ["lease", "advisory"])
def test_an_attempt_ends_at_its_own_deadline(
    server: PostgresServer, mode: str, blocking: bool, connected: bool
) -> None:
    """An acquire with a timeout of a second does not wait longer for a server that hangs."""
    with Proxy(server) as proxy:
        gives_up_in_time(proxy, mode, blocking=blocking, connected=connected)


@pytest.mark.parametrize("mode", MODES)
def test_names_are_listed_in_a_database_without_an_encoding(
    server: PostgresServer, namespace: str, mode: str
) -> None:
    """SQL_ASCII takes any bytes, and has no characters beyond 255."""
    made = "ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {namespace} {made}".encode())
        try:
            url = server.url.rpartition("/")[0] + f"/{namespace}?mode={mode}"
            with (
                holdfast.connect(url) as locks,
                locks.lock("a"),
                locks.lock("aä🔒"),
                locks.lock("b"),
            ):
                assert [each.name for each in locks.list("a")] == ["a", "aä🔒"]
                assert len(locks.list()) == 3
        finally:
            admin.execute(f"DROP DATABASE {namespace} (FORCE)".encode())


def test_a_session_is_ended_with_any_date_format_of_the_role(own_server: PostgresServer) -> None:
    """A session is identified by its start. India's time zone prints as "IST", which PostgreSQL
    reads as Israel's: another moment, at which no session started."""
    with psycopg.connect(own_server.url, autocommit=True) as admin:
        admin.execute("ALTER ROLE holdfast SET datestyle = 'SQL, DMY'")
        admin.execute("ALTER ROLE holdfast SET timezone = 'Asia/Kolkata'")
        store = open_store(f"{own_server.url}?mode=advisory", Settings(namespace="n"))
        backend = store.backend(BlockingRuntime())
        assert isinstance(backend, PostgresAdvisoryBackend)
        run_now(backend.attempt(claim_of(), join=True))
        ((_, session),) = backend.sessions.by_owner.items()
        pid, started = session.connection.pid, session.connection.started
        request = backend.statements.end, (b"%d" % pid, started.encode())
        assert first_value(run_now(backend.pool.request(request))) == b"t"
        there = "SELECT FROM pg_stat_activity WHERE pid = %s"
        assert admin.execute(there, (pid,)).fetchone() is None
        run_now(backend.close())
