"""How sessions of MySQL sleep: on a named lock, and only without one by ``SLEEP()``."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from contextlib import ExitStack
from urllib.parse import urlsplit

import pymysql
import pytest

import holdfast
from holdfast.stores.mysql.sql import sleep, still_lock
from servers.mysql import MySQLServer
from stores.mysql import bench as mysql_bench
from stores.mysql.bench import Admin, account, rows, wait_for

server, admin = mysql_bench.server, mysql_bench.admin

CLIENTS = 4
ASLEEP, BEHIND = "User sleep", "User lock"


def states(admin: Admin, url: str) -> Counter[str]:
    """What the sessions of an account that wait on the server do."""
    sql = "SELECT state FROM information_schema.processlist WHERE user = %s AND state LIKE 'User%%'"
    return Counter(state for (state,) in rows(admin, sql, urlsplit(url).username))


@pytest.mark.parametrize("mode", ["lease", "advisory"])
def test_who_waits_does_so_for_a_lock(
    server: MySQLServer, admin: Admin, namespace: str, mode: str
) -> None:
    """None of them calls ``SLEEP()``, and each is called in its turn."""
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
            wait_for(lambda left=left: states(admin, url) == {BEHIND: left})
            lease = held[CLIENTS - left]
            assert lease is not None
            lease.release()
            threads[CLIENTS - left].join(60)
        assert served == names


@pytest.mark.parametrize("alone", [True, False])
def test_a_killed_sleep_says_so(server: MySQLServer, admin: Admin, alone: bool) -> None:
    """Whether it waited for its lock or, as there was nobody to wait for, slept."""
    lock = still_lock(secrets.token_hex(4))
    url = account(server, admin)
    parts = urlsplit(url)
    told: list[object] = []
    with pymysql.connect(
        host=parts.hostname, port=parts.port or 0, user=parts.username, password="secret"
    ) as session:

        def nap() -> None:
            with session.cursor() as cursor:
                try:
                    cursor.execute(f"SELECT {sleep(lock, 30).decode()}")
                    told.extend(cursor.fetchone() or ())
                except pymysql.OperationalError as error:
                    told.append(error.args[0])

        if not alone:
            rows(admin, f"SELECT GET_LOCK({lock.decode()}, 0)")
        ((number,),) = rows(session, "SELECT CONNECTION_ID()")
        thread = threading.Thread(target=nap)
        thread.start()
        wait_for(lambda: states(admin, url) == {ASLEEP if alone else BEHIND: 1})
        rows(admin, f"KILL QUERY {number}")
        thread.join(60)
        assert told in (["1"], [1], [1317])
