"""Refusals of PostgreSQL and MySQL that are final are raised by the first attempt; a server that is
busy, starting or read-only is tried again."""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.errors import BackendUnavailable
from holdfast.stores._sql.connection import HostFailures
from servers.mysql import MySQLServer
from servers.postgres import PostgresServer
from servers.registry import Servers
from stores.fake_server import fake_server
from stores.mysql import helpers

mysql = helpers.server
MODES = ["lease", "advisory"]
PASSWORD = "CaNaRy8d2w"


@pytest.fixture(scope="module")
def guarded() -> Iterator[PostgresServer]:
    """A server that asks for a password."""
    with PostgresServer(password=PASSWORD) as made:
        yield made


@pytest.fixture
def postgres(servers: Servers) -> PostgresServer:
    return servers.of(PostgresServer)


def refusal(url: str, namespace: str, **options: Any) -> BackendUnavailable:
    """Returns the error of an acquire that has no timeout."""
    with (
        holdfast.connect(url, namespace=namespace, **options) as locks,
        pytest.raises(BackendUnavailable) as caught,
    ):
        locks.lock("name").acquire()
    return caught.value


def assert_final(error: BackendUnavailable, text: str) -> None:
    assert error.final
    assert text in str(error)
    assert "refused" in str(error)
    assert "reached" not in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 400
    assert PASSWORD not in str(error)


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_password_on_postgres(guarded: PostgresServer, namespace: str, mode: str) -> None:
    url = guarded.url.replace(PASSWORD, "wrong")
    assert_final(refusal(f"{url}?mode={mode}", namespace), "password authentication failed")


def test_no_password_on_postgres(guarded: PostgresServer, namespace: str) -> None:
    url = guarded.url.replace(f":{PASSWORD}", "")
    assert_final(refusal(url, namespace), "no password supplied")


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_role_or_database_on_postgres(
    postgres: PostgresServer, namespace: str, mode: str
) -> None:
    role = postgres.url.replace("//holdfast@", "//nobody@")
    assert_final(refusal(f"{role}?mode={mode}", namespace), 'role "nobody" does not exist')
    database = postgres.url.rpartition("/")[0] + "/nowhere"
    assert_final(refusal(f"{database}?mode={mode}", namespace), 'database "nowhere" does not')


def test_missing_rights_on_postgres(postgres: PostgresServer, namespace: str) -> None:
    """A role that may not use the database, and one that may not use our tables."""
    url = postgres.url.replace("//holdfast@", f"//{namespace}@")
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {namespace} LOGIN".encode())
        admin.execute(f"CREATE DATABASE {namespace}".encode())
        admin.execute(f"REVOKE CONNECT ON DATABASE {namespace} FROM PUBLIC".encode())
        closed = url.rpartition("/")[0] + f"/{namespace}"
        assert_final(refusal(closed, namespace), "permission denied for database")
        with holdfast.connect(f"{postgres.url}?schema={namespace}") as locks, locks.lock("n"):
            pass
        admin.execute(f"GRANT USAGE ON SCHEMA {namespace} TO {namespace}".encode())
        admin.execute(f"GRANT ALL ON {namespace}.protocol TO {namespace}".encode())
        error = refusal(f"{url}?schema={namespace}", "holdfast")
        assert_final(error, "permission denied for table")
        for drop in ("DATABASE {0}", "SCHEMA {0} CASCADE", "ROLE {0}"):
            admin.execute(f"DROP {drop.format(namespace)}".encode())


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_password_or_database_on_mysql(
    mysql: MySQLServer, namespace: str, mode: str
) -> None:
    wrong = mysql.url.replace(f":{mysql.password}@", ":wrong@")
    assert_final(refusal(f"{wrong}?mode={mode}", namespace), "Access denied for user")
    nobody = mysql.url.replace("//holdfast:", "//nobody:")
    assert_final(refusal(f"{nobody}?mode={mode}", namespace), "Access denied for user")
    nowhere = mysql.url.rpartition("/")[0] + "/nowhere"
    assert_final(refusal(f"{nowhere}?mode={mode}", namespace), "Unknown database")


def test_missing_rights_on_mysql(mysql: MySQLServer, namespace: str) -> None:
    """An account that may not use the database, and one that may only read our tables."""
    with holdfast.connect(mysql.url, namespace=namespace) as locks, locks.lock("name"):
        pass
    with helpers.open_admin(mysql) as admin:
        none = helpers.account(mysql, admin, "SELECT", "mysql.*")
        reader = helpers.account(mysql, admin, "SELECT")
    assert_final(refusal(none, namespace), "Access denied for user")
    assert_final(refusal(reader, namespace), "command denied to user")


def test_another_protocol_on_the_port(namespace: str) -> None:
    def ssh(connection: socket.socket) -> None:
        connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n" * 20)

    def http(connection: socket.socket) -> None:
        connection.recv(8)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with fake_server(ssh) as port:
        url = f"mysql://someone:{PASSWORD}@127.0.0.1:{port}/database"
        assert_final(refusal(url, namespace), "no MySQL server is at this address")
    with fake_server(http) as port:
        for mode in ("prefer", "disable"):
            url = f"postgresql://someone:{PASSWORD}@127.0.0.1:{port}/database?sslmode={mode}"
            assert_final(refusal(url, namespace), "no PostgreSQL server is at this address")


def test_a_server_that_starts_is_tried_again(namespace: str) -> None:
    def starting(connection: socket.socket) -> None:
        connection.recv(1024)
        words = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0"
        connection.sendall(b"E" + struct.pack("!i", len(words) + 4) + words)

    with fake_server(starting) as port:
        url = f"postgresql://someone@127.0.0.1:{port}/database?sslmode=disable"
        error = refusal(url, namespace, patience=1)
    assert not error.final
    assert "can't be reached" in str(error)
    assert "starting up" in str(error)


@pytest.mark.parametrize("code", [1040, 1203, 1226, 1053])
def test_a_busy_mysql_server_is_tried_again(namespace: str, code: int) -> None:
    payload = b"\xff" + code.to_bytes(2, "little") + b"#08004try again later"
    reply = len(payload).to_bytes(3, "little") + b"\0" + payload
    with fake_server(lambda connection: connection.sendall(reply)) as port:
        url = f"mysql://someone@127.0.0.1:{port}/database"
        error = refusal(url, namespace, patience=1)
    assert not error.final
    assert "can't be reached" in str(error)
    assert "try again later" in str(error)


def test_an_address_is_final_if_every_host_is() -> None:
    final, passing = BackendUnavailable("refused", final=True), BackendUnavailable("is down")
    failures = HostFailures("postgresql://a,b")
    failures.add("a", final)
    failures.add("a", passing)  # another IP address of the same host
    assert failures.error() is final
    failures.add("b", passing)
    assert failures.error() is passing


def test_an_address_of_several_hosts(mysql: MySQLServer, namespace: str) -> None:
    """The password may be right for the host that can't be reached."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    login = f"holdfast:{secrets.token_hex(4)}"
    hosts = f"{mysql.host}:{mysql.port},{mysql.host}:{port}"
    error = refusal(f"mysql://{login}@{hosts}/holdfast", namespace, patience=1)
    assert not error.final
