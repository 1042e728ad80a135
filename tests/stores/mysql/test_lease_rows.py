"""Lease rows on MySQL: schema, rights, round trips, TLS, purging."""

from __future__ import annotations

import asyncio
import secrets
import threading
from contextlib import ExitStack

import pytest

import holdfast
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, Incompatible, Unsupported
from holdfast.stores.mysql.sql import TABLES, schema_sql
from servers.mysql import MySQLServer
from servers.proxy import Proxy
from servers.registry import Servers
from servers.tls import make_certificate
from stores.claims import claim_of
from stores.mysql import helpers
from stores.mysql.helpers import (
    Admin,
    account,
    backend_of,
    rows,
    taken,
)

server, admin = helpers.server, helpers.admin

NAMES = ("name", "Name", "namé", "name ", "nam\N{LATIN SMALL LETTER E}\N{COMBINING ACUTE ACCENT}")


def test_the_schema_can_be_created_by_hand_and_repeatedly(
    server: MySQLServer, admin: Admin
) -> None:
    """``schema_sql`` is idempotent, keeps existing rows, and is all that a client needs."""
    prefix = f"p{secrets.token_hex(4)}_"
    rows(admin, schema_sql(prefix=prefix))
    with holdfast.connect(f"{server.url}?prefix={prefix}") as locks, locks.lock("kept") as lease:
        rows(admin, schema_sql(prefix=prefix))
        assert rows(admin, f"SELECT token FROM {prefix}lock") == [(lease.token,)]
        assert lease.held
    tables = rows(admin, "SHOW TABLES LIKE %s", f"{prefix.removesuffix('_')}\\_%")
    assert {row[0] for row in tables} == {prefix + table for table in TABLES}


def test_many_clients_create_the_schema_at_once(server: MySQLServer, namespace: str) -> None:
    """Concurrent first connections create one schema."""
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
    """Invalid options are refused when the client is created."""
    with pytest.raises(ValueError, match=option.split("=", maxsplit=1)[0]):
        holdfast.connect(f"{server.url}?{option}")


def test_a_url_without_a_database_is_refused() -> None:
    """The tables need a database."""
    with pytest.raises(ValueError, match="needs a database"):
        holdfast.connect("mysql://user@host")


def test_missing_rights_are_reported_with_the_command(server: MySQLServer, admin: Admin) -> None:
    """An account that may not create tables is told in a line what to run; then it works."""
    prefix = f"p{secrets.token_hex(4)}_"
    url = account(server, admin, "SELECT, INSERT, UPDATE, DELETE") + f"?prefix={prefix}"
    locks = holdfast.connect(url, patience=5)
    with pytest.raises(Unsupported, match="holdfast schema mysql") as caught:
        locks.lock("name").acquire()
    assert f"`holdfast schema mysql --prefix {prefix} | mysql …`" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    rows(admin, schema_sql(prefix=prefix))
    with locks.lock("name") as lease, holdfast.connect(url) as other:
        assert other.lock("name").acquire(timeout=1) is None  # waiting needs no more rights
        assert lease.held
    locks.close()


def test_tables_without_transactions_are_refused(server: MySQLServer, admin: Admin) -> None:
    """The server's default engine may have no transactions."""
    prefix = f"p{secrets.token_hex(4)}_"
    rows(admin, schema_sql(prefix=prefix).replace("InnoDB ROW_FORMAT=DYNAMIC", "Aria"))
    locks = holdfast.connect(f"{server.url}?prefix={prefix}")
    with pytest.raises(Unsupported, match="InnoDB is needed"):
        locks.lock("name").acquire(timeout=0)
    locks.close()


def test_other_protocols_are_refused(server: MySQLServer, admin: Admin, namespace: str) -> None:
    """A namespace of a newer version, or of the other mode, is refused."""
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
        run_now(backend.release(taken(backend, claim_of("warm"))))
        proxy.reset_counts()
        for number in range(10):
            grant = taken(backend, claim_of(f"name {number}"))
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
        assert {info.name for info in others.list()} == set(names)


def test_a_wrong_password_is_not_shown(server: MySQLServer, namespace: str) -> None:
    """The error of a failed login names the server and no secret."""
    wrong = server.url.replace(":secret@", ":wrong-7261@")
    locks = holdfast.connect(wrong, namespace=namespace, patience=0.2)
    with pytest.raises(BackendUnavailable, match="Access denied") as caught:
        locks.lock("name").acquire()
    assert "7261" not in str(caught.value)
    assert "7261" not in repr(locks)
    locks.close()


class TlsServer(MySQLServer):
    """A server that requires TLS, with a certificate of its own."""

    def __init__(self) -> None:
        super().__init__()
        made = make_certificate(self.folder)
        self.certificate = made.certificate
        self.arguments += [f"--ssl-cert={made.certificate}", f"--ssl-key={made.key}"]
        self.arguments += ["--require-secure-transport=1"]


@pytest.mark.parametrize("mode", ["lease", "advisory"])
def test_tls_is_verified(servers: Servers, namespace: str, mode: str) -> None:
    """Blocking and asyncio clients wait over TLS; an unknown certificate is refused."""
    server = servers.of(TlsServer)
    url = f"{server.url}?mode={mode}&ssl_ca={server.certificate}"
    with (
        holdfast.connect(url, namespace=namespace) as ours,
        holdfast.connect(url, namespace=namespace) as theirs,
    ):
        assert any(finding.detail == "TLS" for finding in ours.check())
        lease = ours.lock("name").acquire()
        assert lease is not None
        assert theirs.lock("name").acquire(timeout=1) is None

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
    """Rows that were not used for a week are deleted; tokens still grow."""
    backend = backend_of(server.url, namespace)
    old = taken(backend, claim_of("old"))
    assert run_now(backend.release(old))
    held = taken(backend, claim_of("held", ttl=3600))
    age = "UPDATE holdfast_lock SET version = version - 8 * 86400 * 1000000 WHERE namespace = %s"
    rows(admin, age, namespace)
    young = taken(backend, claim_of("young"))
    backend._until_purge = 0  # type: ignore[attr-defined]
    assert run_now(backend.release(young))
    names = rows(admin, "SELECT name FROM holdfast_lock WHERE namespace = %s ORDER BY 1", namespace)
    assert names == [(b"held",), (b"young",)]
    assert run_now(backend.release(held))
    assert taken(backend, claim_of("old")).token > old.token
    run_now(backend.close())


def test_tokens_grow_when_the_clock_is_set_back(
    server: MySQLServer, admin: Admin, namespace: str
) -> None:
    """The row has a token from the future, and the next one is above it."""
    with holdfast.connect(server.url, namespace=namespace) as locks:
        with locks.lock("name"):
            pass
        future = 2**62
        rows(admin, "UPDATE holdfast_lock SET token = %s WHERE namespace = %s", future, namespace)
        with locks.lock("name") as lease:
            assert lease.token == future + 1
        with locks.rwlock("name").read() as lease:
            assert lease.token == future + 2
