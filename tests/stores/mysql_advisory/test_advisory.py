"""Named locks on MySQL: sessions, kills, the ttl, and what is refused."""

from __future__ import annotations

import os
import signal
import threading
from math import inf
from typing import Any

import pymysql
import pytest

import holdfast
from holdfast.claim import Busy
from holdfast.core.drive import run_now
from holdfast.errors import GuaranteeNotMet, LimitMismatch, Unsupported
from holdfast.io.clock import now
from holdfast.testing.stalls import Stalls
from servers.mysql import MySQLServer
from servers.proxy import Proxy
from servers.registry import Servers
from stores.claims import claim_of
from stores.mysql import helpers
from stores.mysql.helpers import Admin, backend_of, key, one, rows, taken, wait_for

server, admin = helpers.server, helpers.admin


@pytest.fixture
def url(server: MySQLServer) -> str:
    return f"{server.url}?mode=advisory"


def test_the_lock_is_the_documented_one(url: str, admin: Admin, namespace: str) -> None:
    """Any session can see that it is held, and that it is free after the release."""
    with holdfast.connect(url, namespace=namespace) as locks:
        with locks.lock("name"):
            assert one(admin, f"SELECT IS_USED_LOCK('{key(namespace)}')") is not None
        assert one(admin, f"SELECT IS_FREE_LOCK('{key(namespace)}')") == 1


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("kind", ["KILL", "KILL QUERY"])
def test_a_killed_waiter_enters_the_queue_again(
    url: str, admin: Admin, namespace: str, kind: str, slots: bool
) -> None:
    """An interrupted wait is an error of the server, never a grant."""
    with holdfast.connect(url, namespace=namespace) as locks:

        def lock() -> holdfast.Lock:
            return locks.semaphore("name", 1) if slots else locks.lock("name")

        lease = lock().acquire()
        assert lease is not None
        tokens: list[int] = []

        def wait() -> None:
            got = lock().acquire(timeout=60)
            assert got is not None
            tokens.append(got.token)
            got.release()

        thread = threading.Thread(target=wait)
        thread.start()
        like = f"%{key(namespace)}%{'FIELD' if slots else '/*hf'}%"
        waiting = f"SELECT MAX(id) FROM information_schema.processlist WHERE info LIKE '{like}'"
        waiting += " AND id <> CONNECTION_ID()"
        wait_for(lambda: one(admin, waiting))
        one(admin, f"{kind} {one(admin, waiting)}")
        wait_for(lambda: one(admin, waiting))
        assert not tokens
        lease.release()
        thread.join(60)
        assert tokens[0] > lease.token


def test_the_server_ends_a_holder_that_hangs(url: str, namespace: str) -> None:
    """A stopped process can't renew: the server ends its session after the ttl."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        locks = holdfast.connect(url, namespace=namespace)
        lease = locks.lock("name", ttl=1).acquire()
        os.write(write, str(lease.token).encode() if lease else b"-")
        signal.pause()
        os._exit(0)
    token = int(os.read(read, 100))
    os.kill(child, signal.SIGSTOP)
    try:
        with holdfast.connect(url, namespace=namespace) as locks:
            began = now()
            with Stalls() as stalls, locks.lock("name", timeout=30) as lease:
                assert lease.token > token
                assert now() - began - stalls.seconds < 5
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_a_restart_loses_holds_and_reports_it(servers: Servers, namespace: str) -> None:
    """Named locks are in the server's memory: their holders learn of the loss."""
    server = servers.of(MySQLServer, arguments=("--innodb-log-file-size=16M",))
    with holdfast.connect(f"{server.url}?mode=advisory", namespace=namespace) as locks:
        lease = locks.lock("name", ttl=2).acquire()
        assert lease is not None
        lost = threading.Event()
        lease.on_lost(lambda _: lost.set())
        server.kill()
        server.start()
        assert lost.wait(20)
        with locks.lock("name", timeout=20) as later:
            assert later.token > lease.token


def test_a_fork_leaves_the_hold_with_the_parent(url: str, admin: Admin, namespace: str) -> None:
    """The child drops the inherited session without a message to the server; the lock stays."""
    with holdfast.connect(url, namespace=namespace) as locks, locks.lock("name") as lease:
        child = os.fork()
        if child == 0:
            busy = locks.lock("name").acquire(timeout=0) is None
            os._exit(0 if busy else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert one(admin, f"SELECT IS_USED_LOCK('{key(namespace)}')") is not None
        lease.extend()
        assert lease.held


def test_readers_are_refused_when_they_are_made(url: str, namespace: str) -> None:
    """``GET_LOCK`` has no shared mode."""
    with holdfast.connect(url, namespace=namespace) as locks, pytest.raises(Unsupported):
        locks.rwlock("name")
    with pytest.raises(GuaranteeNotMet):
        holdfast.connect(url, require=["SHARED"])


def test_a_name_changes_its_kind_when_it_is_not_in_use(url: str, namespace: str) -> None:
    """Lock, semaphore, another limit: each is fixed while it is held, and not after."""
    with holdfast.connect(url, namespace=namespace) as locks:
        for first, second in ((0, 2), (2, 3), (3, 0), (0, 2), (2, 0)):
            made = [
                locks.semaphore("name", n) if n else locks.lock("name") for n in (first, second)
            ]
            with made[0] as lease:
                with pytest.raises(LimitMismatch):
                    made[1].acquire(timeout=0)
                assert lease.held
            with made[1] as lease:
                assert lease.held


def test_a_nudge_is_forgotten_with_the_grant(url: str, namespace: str) -> None:
    """It was for a wait that does not happen."""
    backend: Any = backend_of(url, namespace)
    asked, dial = claim_of(), backend._dial

    def dial_and_nudge(world: object, until: float) -> object:
        backend.nudge(asked)
        assert backend._nudged == {asked.owner}
        return dial(world, until)

    backend._dial = dial_and_nudge
    assert run_now(backend.release(taken(backend, asked)))
    assert not backend._nudged
    run_now(backend.close())


def test_waiters_are_shown(url: str, namespace: str) -> None:
    """Sessions in the server's queue, with their label and note; not after their grant."""
    with (
        holdfast.connect(url, namespace=namespace) as ours,
        holdfast.connect(url, namespace=namespace) as theirs,
    ):
        took: list[holdfast.Lease | None] = []
        wanted = theirs.lock("name", note="it's me */ '")
        thread = threading.Thread(target=lambda: took.append(wanted.acquire(timeout=60)))
        with ours.lock("name"):
            thread.start()
            wait_for(lambda: ours.inspect("name").waiters)
            (waiter,) = ours.inspect("name").waiters
            assert (waiter.note, waiter.pid) == ("it's me */ '", os.getpid())
        thread.join(60)
        info = ours.inspect("name")
        assert [holder.note for holder in info.holders] == ["it's me */ '"]
        assert info.waiters == ()
        assert took[0] is not None
        took[0].release()


@pytest.mark.parametrize("old", [False, True])
def test_a_waiter_is_woken_with_its_grant(
    server: MySQLServer, url: str, namespace: str, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends it a ttl after the grant, which may be as old as the request that waited:
    the ttl counts from there. A grant that may be too old is renewed before it is returned."""
    if old:
        monkeypatch.setattr("holdfast.stores._sql.advisory.FRESH_SHARE", 0.0)
    with Proxy(server) as proxy:
        holder = backend_of(url, namespace)
        waiter = backend_of(f"{proxy.url}?mode=advisory", namespace)
        held, asked = taken(holder, claim_of()), claim_of()
        busy = run_now(waiter.attempt(asked, join=True))
        queued_at = now()
        assert isinstance(busy, Busy)
        wait_for(lambda: run_now(holder.look("name")).waiters)
        proxy.reset_counts()
        assert run_now(holder.release(held))
        run_now(waiter.wait(asked, busy, now() + 60))
        grant = taken(waiter, asked)
        assert grant.token > held.token
        assert proxy.counts.requests == old
        assert grant.since is None if old else (grant.since or inf) <= queued_at
        assert [one.token for one in run_now(holder.look("name")).holders] == [grant.token]
        assert run_now(waiter.release(grant))
        for backend in (holder, waiter):
            run_now(backend.close())


def test_an_old_hold_of_the_session_is_not_shown(
    server: MySQLServer, url: str, admin: Admin, namespace: str
) -> None:
    """A session that takes the name again has its lock before its row says so."""
    with (
        holdfast.connect(url, namespace=namespace) as locks,
        holdfast.connect(url, namespace=namespace) as looking,
    ):
        with locks.lock("name") as first:
            assert [holder.token for holder in looking.inspect("name").holders] == [first.token]
        taken: list[holdfast.Lease | None] = []
        thread = threading.Thread(
            target=lambda: taken.append(locks.lock("name").acquire(timeout=60))
        )
        used = f"SELECT IS_USED_LOCK('{key(namespace)}')"
        with pymysql.connect(
            unix_socket=str(server.folder / "mysql.sock"), user="root", database="holdfast"
        ) as slow:
            with slow.cursor() as cursor:
                sql = "SELECT * FROM holdfast_counter WHERE namespace = %s FOR UPDATE"
                assert cursor.execute(sql, (namespace.encode(),)) == 1
            thread.start()
            wait_for(lambda: one(admin, used))
            assert looking.inspect("name").holders == ()
            slow.rollback()
        thread.join(60)
        assert taken[0] is not None
        tokens = [holder.token for holder in looking.inspect("name").holders]
        assert tokens == [taken[0].token] != [first.token]
        taken[0].release()


def test_a_contended_hold_is_two_requests(server: MySQLServer, url: str, namespace: str) -> None:
    """On a contended name one request tries, waits and takes, and another one releases; also when
    the name is free again. An attempt that may not wait is one request."""
    with Proxy(server) as proxy:
        holder = backend_of(url, namespace)
        waiter = backend_of(f"{proxy.url}?mode=advisory", namespace)
        held = taken(holder, claim_of())
        assert isinstance(run_now(waiter.attempt(claim_of(), join=False)), Busy)
        for _ in range(2):
            proxy.reset_counts()
            asked = claim_of()
            busy = run_now(waiter.attempt(asked, join=True))
            assert isinstance(busy, Busy)
            wait_for(lambda: run_now(holder.look("name")).waiters)
            assert run_now(holder.release(held))
            run_now(waiter.wait(asked, busy, now() + 60))
            grant = taken(waiter, asked)
            assert grant.token > held.token
            assert isinstance(run_now(holder.attempt(claim_of(), join=False)), Busy)
            assert run_now(waiter.release(grant))
            assert proxy.counts.requests == 2
            held = taken(holder, claim_of())
        proxy.reset_counts()
        assert isinstance(run_now(waiter.attempt(claim_of(), join=False)), Busy)
        assert run_now(holder.release(held))
        assert run_now(waiter.release(taken(waiter, claim_of())))
        assert proxy.counts.requests == 3
        assert run_now(holder.look("name")).holders == ()
        for backend in (holder, waiter):
            run_now(backend.close())


def test_a_waiter_is_granted_also_if_the_row_was_deleted(
    url: str, admin: Admin, namespace: str
) -> None:
    """It increments the token in the existing row, and inserts a row if there is none."""
    holder, waiter = backend_of(url, namespace), backend_of(url, namespace)
    held, asked = taken(holder, claim_of()), claim_of()
    busy = run_now(waiter.attempt(asked, join=True))
    assert isinstance(busy, Busy)
    rows(admin, "DELETE FROM holdfast_counter WHERE namespace = %s", namespace)
    assert run_now(holder.release(held))
    run_now(waiter.wait(asked, busy, now() + 60))
    grant = taken(waiter, asked)
    assert grant.token > held.token
    assert [one.token for one in run_now(holder.look("name")).holders] == [grant.token]
    assert run_now(waiter.release(grant))
    assert one(admin, f"SELECT IS_FREE_LOCK('{key(namespace)}')") == 1
    for backend in (holder, waiter):
        run_now(backend.close())
