"""How sessions sleep on the server: on a named lock, and only without one by ``SLEEP()``."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from contextlib import ExitStack
from urllib.parse import urlsplit

import pymysql
import pytest

import holdfast
from holdfast.stores.mysql.sql import sleep_expression, sleep_lock
from servers.mysql import MySQLServer
from stores.mysql import helpers
from stores.mysql.helpers import Admin, account, rows, wait_for

server, admin = helpers.server, helpers.admin

CLIENTS = 4
IN_SLEEP, ON_LOCK = "User sleep", "User lock"


def states(admin: Admin, url: str) -> Counter[str]:
    """Counts the states of an account's sessions that wait on the server."""
    sql = "SELECT state FROM information_schema.processlist WHERE user = %s AND state LIKE 'User%%'"
    return Counter(state for (state,) in rows(admin, sql, urlsplit(url).username))


@pytest.mark.parametrize("mode", ["lease", "advisory"])
def test_waiters_sleep_on_a_named_lock(
    server: MySQLServer, admin: Admin, namespace: str, mode: str
) -> None:
    """No session calls ``SLEEP()``, and each waiter is woken by the release of its name."""
    url = account(server, admin) + f"?mode={mode}"
    with ExitStack() as stack:

        def client() -> holdfast.Locks:
            return stack.enter_context(holdfast.connect(url, namespace=namespace))

        names = [f"name {number}" for number in range(CLIENTS)]
        ours = client()
        held = [ours.semaphore(name, 1).acquire() for name in names]
        served: list[str] = []

        def serve(locks: holdfast.Locks, name: str) -> None:
            with locks.semaphore(name, 1, timeout=60):
                served.append(name)

        threads = [threading.Thread(target=serve, args=(client(), name)) for name in names]
        for thread in threads:
            thread.start()
        for left in range(CLIENTS, 0, -1):
            wait_for(lambda left=left: states(admin, url) == {ON_LOCK: left})
            lease = held[CLIENTS - left]
            assert lease is not None
            lease.release()
            threads[CLIENTS - left].join(60)
        assert served == names


@pytest.mark.parametrize("alone", [True, False])
def test_a_killed_sleep_is_reported(server: MySQLServer, admin: Admin, alone: bool) -> None:
    """Both for a wait for the lock and, if the lock was free, for ``SLEEP()``."""
    lock = sleep_lock(secrets.token_hex(4))
    url = account(server, admin)
    parts = urlsplit(url)
    results: list[object] = []
    with pymysql.connect(
        host=parts.hostname, port=parts.port or 0, user=parts.username, password="secret"
    ) as session:

        def sleep_on_server() -> None:
            with session.cursor() as cursor:
                try:
                    cursor.execute(f"SELECT {sleep_expression(lock, 30).decode()}")
                    results.extend(cursor.fetchone() or ())
                except pymysql.OperationalError as error:
                    results.append(error.args[0])

        if not alone:
            rows(admin, f"SELECT GET_LOCK({lock.decode()}, 0)")
        ((number,),) = rows(session, "SELECT CONNECTION_ID()")
        thread = threading.Thread(target=sleep_on_server)
        thread.start()
        wait_for(lambda: states(admin, url) == {IN_SLEEP if alone else ON_LOCK: 1})
        rows(admin, f"KILL QUERY {number}")
        thread.join(60)
        assert results in (["1"], [1], [1317])
