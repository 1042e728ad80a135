"""Server settings that a session must override: time zone, autocommit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pymysql
import pytest

import holdfast
from fencing.accounts import mysql_settings
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.io.blocking import WORLD
from holdfast.io.clock import now
from holdfast.sql import transaction_lock
from holdfast.stores._sql.connection import Opening
from holdfast.stores.mysql.connect import MySqlDialler
from holdfast.stores.mysql.sql import NOW
from holdfast.url import parse_url
from servers.mysql import MySQLServer
from servers.registry import Servers
from stores.mysql.helpers import open_admin, rows

TWICE = 1_792_888_200
"""2026-10-25 00:30 UTC, and an hour later, are both half past two in the middle of Europe."""


class EuropeanServer(MySQLServer):
    """A server in a time zone with summer time, and without autocommit."""

    def __init__(self, *, arguments: Sequence[str] = ()) -> None:
        super().__init__(arguments=["--autocommit=0", *arguments])

    def command(self) -> list[str | Path]:
        return ["env", "TZ=CET-1CEST,M3.5.0,M10.5.0/3", *super().command()]


@pytest.fixture
def server(servers: Servers) -> EuropeanServer:
    return servers.of(EuropeanServer)


def test_the_server_is_as_it_should_be(server: EuropeanServer) -> None:
    """Otherwise the other tests of this module test nothing."""
    with open_admin(server) as admin:
        assert rows(admin, "SELECT @@GLOBAL.time_zone, @@GLOBAL.autocommit") == [("SYSTEM", 0)]
        ((first, second),) = rows(
            admin, f"SELECT FROM_UNIXTIME({TWICE}), FROM_UNIXTIME({TWICE + 3600})"
        )
    assert first == second


@pytest.mark.parametrize("mode", ["lease", "advisory"])
def test_an_hour_that_comes_twice_is_two_hours(server: EuropeanServer, mode: str) -> None:
    """Holds would last an hour longer, or end at once, and tokens go back."""
    url = parse_url(f"{server.url}?mode={mode}")
    connection = run_now(MySqlDialler(url, Settings(), mode).connect(WORLD, now() + 20))
    opening = Opening(WORLD, connection, now() + 20)
    times = []
    for at in (TWICE, TWICE + 3600):
        ask = f"SET timestamp = {at}; SELECT {NOW}".encode()
        times.append(connection.checked(run_now(opening.ask(ask)))[1].rows[0][0])
    connection.close()
    assert [int(value or 0) for value in times] == [TWICE * 10**6, (TWICE + 3600) * 10**6]


@pytest.mark.parametrize("mode", ["lease", "advisory"])
def test_a_hold_is_committed_as_it_is_taken(
    server: EuropeanServer, namespace: str, mode: str
) -> None:
    """Another client sees the hold, and acquires after its release."""
    url = f"{server.url}?mode={mode}"
    with (
        holdfast.connect(url, namespace=namespace + mode) as ours,
        holdfast.connect(url, namespace=namespace + mode) as theirs,
    ):
        lease = ours.lock("name").acquire()
        assert lease is not None
        assert [holder.token for holder in theirs.inspect("name").holders] == [lease.token]
        assert theirs.lock("name").acquire(timeout=0) is None
        assert lease.release()
        again = theirs.lock("name").acquire(timeout=0)
        assert again is not None
        assert again.token > lease.token
        again.release()


def test_tokens_of_a_transaction_lock_grow_through_the_hour(
    server: EuropeanServer, namespace: str
) -> None:
    """A rollback undoes the increment: only the clock orders the two tokens."""
    with holdfast.connect(server.url) as locks:
        locks.list()  # creates the tables
    tokens = []
    settings: dict[str, Any] = mysql_settings(server.url)
    with pymysql.connect(**settings) as connection:
        for at in (TWICE, TWICE + 3600):
            with connection.cursor() as cursor:
                cursor.execute(f"SET timestamp = {at}")
            tokens.append(transaction_lock(connection, "name", namespace=namespace).token)
            connection.rollback()
    assert tokens == [TWICE * 10**6, (TWICE + 3600) * 10**6]
