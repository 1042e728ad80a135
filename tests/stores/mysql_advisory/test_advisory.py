"""What is peculiar to named locks on MySQL: sessions, kills, the ttl, what is refused."""

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
from stores.mysql import bench as mysql_bench
from stores.mysql.bench import Admin, backend_of, key, one, rows, taken, wait_for

server, admin = mysql_bench.server, mysql_bench.admin


@pytest.fixture
def url(server: MySQLServer) -> str:
    return f"{server.url}?mode=advisory"


def test_the_lock_is_the_documented_one(url: str, admin: Admin, namespace: str) -> None:
    """Anybody can see who has it, and that it was taken once only."""
    with holdfast.connect(url, namespace=namespace) as locks:
        with locks.lock("name"):
            assert one(admin, f"SELECT IS_USED_LOCK('{key(namespace)}')") is not None
        assert one(admin, f"SELECT IS_FREE_LOCK('{key(namespace)}')") == 1


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("kind", ["KILL", "KILL QUERY"])
def test_a_killed_waiter_lines_up_again(
    url: str, admin: Admin, namespace: str, kind: str, slots: bool
) -> None:
    """An interrupted wait is an error of the server's, never a grant."""
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
    """A process that is stopped can't renew: its session is ended after its ttl."""
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


def test_a_restart_loses_holds_and_tells(servers: Servers, namespace: str) -> None:
    """Named locks are in the server's memory: nobody who held one thinks so afterwards."""
    server = servers.of(MySQLServer, arguments=("--innodb-log-file-size=16M",))
    with holdfast.connect(f"{server.url}?mode=advisory", namespace=namespace) as locks:
        lease = locks.lock("name", ttl=2).acquire()
        assert lease is not None
        told = threading.Event()
        lease.on_lost(lambda _: told.set())
        server.kill()
        server.start()
        assert told.wait(20)
        with locks.lock("name", timeout=20) as later:
            assert later.token > lease.token


def test_a_fork_leaves_the_hold_with_the_parent(url: str, admin: Admin, namespace: str) -> None:
    """The child drops the inherited session without a word; the lock stays where it was."""
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
    """``GET_LOCK`` knows no shared mode, and nothing pretends that it does."""
    with holdfast.connect(url, namespace=namespace) as locks, pytest.raises(Unsupported):
        locks.rwlock("name")
    with pytest.raises(GuaranteeNotMet):
        holdfast.connect(url, require=["SHARED"])


def test_a_name_changes_its_kind_when_nobody_uses_it(url: str, namespace: str) -> None:
    """Lock, semaphore, another limit: each binds while it is held, and not after."""
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
    """It was for a wait that there is not."""
    backend: Any = backend_of(url, namespace)
    asked, dial = claim_of(), backend._dial

    def dial_and_nudge(until: float) -> object:
        backend.nudge(asked)
        assert backend._nudged == {asked.owner}
        return dial(until)

    backend._dial = dial_and_nudge
    assert run_now(backend.release(taken(backend, asked)))
    assert not backend._nudged
    run_now(backend.close())


def test_waiters_are_shown(url: str, namespace: str) -> None:
    """Who stands in the server's queue, with what they say of themselves; not once they hold."""
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
        standing = ours.inspect("name")
        assert [holder.note for holder in standing.holders] == ["it's me */ '"]
        assert standing.waiters == ()
        assert took[0] is not None
        took[0].release()


@pytest.mark.parametrize("old", [False, True])
def test_a_waiter_is_woken_with_its_grant(
    server: MySQLServer, url: str, namespace: str, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends it a ttl after the grant, which may be as old as the request that waited:
    its time counts from there. One that may be too old is renewed before it is told."""
    if old:
        monkeypatch.setattr("holdfast.stores.mysql_advisory.backend.FRESH_SHARE", 0.0)
    with Proxy(server) as proxy:
        holder = backend_of(url, namespace)
        waiter = backend_of(f"{proxy.url}?mode=advisory", namespace)
        held, asked = taken(holder, claim_of()), claim_of()
        busy = run_now(waiter.attempt(asked, join=True))
        lined_up = now()
        assert isinstance(busy, Busy)
        wait_for(lambda: run_now(holder.look("name")).waiters)
        proxy.reset_counts()
        assert run_now(holder.release(held))
        run_now(waiter.wait(asked, busy, now() + 60))
        grant = taken(waiter, asked)
        assert grant.token > held.token
        assert proxy.counts.requests == old
        assert grant.since is None if old else (grant.since or inf) <= lined_up
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
    """Where others wanted the name, one request asks, waits and takes, and another frees; also
    where it is free again. Who may not wait asks once, and waits for nothing."""
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


def test_who_waited_comes_also_where_the_row_is_gone(
    url: str, admin: Admin, namespace: str
) -> None:
    """It counts in the row of the one before; where there is none any more, it makes one."""
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
