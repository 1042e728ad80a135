"""Faults of MySQL: killed sessions, restarts, forks, limits, cancelled requests."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress

import pymysql
import pytest

import holdfast
from holdfast.claim import Busy, Grant
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from servers.mysql import MySQLServer
from servers.proxy import Proxy
from servers.registry import Servers
from stores.claims import claim_of
from stores.mysql import helpers
from stores.mysql.helpers import (
    Admin,
    account,
    backend_of,
    open_admin,
    rows,
    taken,
    wait_for,
)
from stores.sql_deadline import gives_up_in_time

pytestmark = pytest.mark.faults

server, admin = helpers.server, helpers.admin

MODES = ["lease", "advisory"]


def test_a_waiter_whose_session_has_ended_is_skipped_at_once(
    server: MySQLServer, admin: Admin, namespace: str
) -> None:
    """The server knows which sessions exist: the next waiter does not wait for a grace period."""
    first, holder = backend_of(server.url, namespace), backend_of(server.url, namespace)
    third = backend_of(server.url, namespace)
    grant = taken(holder, claim_of())
    for backend, asked in ((first, claim_of()), (third, claim_of())):
        for _ in range(2):  # the second attempt stores the subscription that the first wait opens
            busy = run_now(backend.attempt(asked, join=True))
            assert isinstance(busy, Busy)
            run_now(backend.wait(asked, busy, 0.0 if busy.ref else now() + 60))
    run_now(first.close())
    subscription = first.wakeups.subscription  # type: ignore[attr-defined]
    wait_for(lambda: rows(admin, f"SELECT IS_USED_LOCK('hf:bell:{subscription}')") == [(None,)])
    assert run_now(holder.release(grant))
    assert len(run_now(holder.look("name")).waiters) == 1
    assert isinstance(taken(third, asked), Grant)
    for backend in (holder, third):
        run_now(backend.close())


@pytest.mark.parametrize("mode", MODES)
def test_tokens_grow_across_crashes_of_the_server(
    servers: Servers, namespace: str, mode: str
) -> None:
    """kill -9 right after a grant, twenty times: every token is above the one before."""
    server = servers.of(MySQLServer, arguments=("--innodb-log-file-size=16M",))
    url = f"{server.url}?mode={mode}"
    tokens: list[int] = []
    for _ in range(20):
        with holdfast.connect(url, namespace=namespace, patience=60) as locks:
            lease = locks.lock("name", ttl=0.2, renew=False).acquire(timeout=60)
            assert lease is not None
            tokens.append(lease.token)
            server.kill()
            lease.release()
        server.start()
    assert tokens == sorted(set(tokens))


def test_a_hold_outlives_a_restart(servers: Servers, namespace: str) -> None:
    """The row and its waiter are still there."""
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
    """After a fork the parent's hold stays, and the child waits for it like another process."""
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


@pytest.mark.parametrize("mode", MODES)
def test_a_server_without_free_connections_is_reported(
    servers: Servers, namespace: str, mode: str
) -> None:
    """The error names the cause, and a lock is granted once a connection is free."""
    server = servers.of(
        MySQLServer, arguments=("--max-connections=10", "--extra-max-connections=1")
    )
    with open_admin(server) as admin:
        url = f"{account(server, admin)}?mode={mode}"
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


@pytest.mark.parametrize("mode", MODES)
def test_a_read_only_server_is_refused(servers: Servers, namespace: str, mode: str) -> None:
    """Locks need the primary, also for an account that may write to a replica."""
    server = servers.of(MySQLServer, arguments=("--read-only=1",))
    locks = holdfast.connect(f"{server.url}?mode={mode}", namespace=namespace, patience=0.2)
    with pytest.raises(BackendUnavailable, match="read-only replica"):
        locks.lock("name").acquire()
    locks.close()


def test_a_server_that_becomes_read_only_is_refused(
    servers: Servers, admin: Admin, namespace: str
) -> None:
    """A failover under an open connection: the write fails, and the error names the cause."""
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


def test_a_cancelled_request_leaves_its_connection_usable(
    server: MySQLServer, namespace: str
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


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "asyncio"])
@pytest.mark.parametrize("mode", MODES)
def test_an_attempt_ends_at_its_own_deadline(
    server: MySQLServer, mode: str, blocking: bool, connected: bool
) -> None:
    """An attempt with a timeout of a second does not wait longer for a server that hangs."""
    with Proxy(server) as proxy:
        gives_up_in_time(proxy, mode, blocking=blocking, connected=connected)


@pytest.mark.parametrize("mode", MODES)
def test_a_read_only_host_is_skipped(server: MySQLServer, namespace: str, mode: str) -> None:
    """Of several hosts the writable one is used, also if it is not the first."""
    login = server.url.partition("@")[0]
    with MySQLServer(arguments=["--read-only=ON"]) as replica:
        hosts = f"{replica.host}:{replica.port},{server.host}:{server.port}"
        url = f"{login}@{hosts}/holdfast?mode={mode}"
        with holdfast.connect(url, namespace=namespace, patience=5) as locks:
            with locks.lock("name") as lease:
                assert lease.held
            same = holdfast.connect(f"{server.url}?mode={mode}", namespace=namespace)
            with same, same.lock("name") as theirs:
                assert theirs.token > lease.token
