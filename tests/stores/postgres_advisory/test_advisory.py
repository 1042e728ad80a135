"""What is specific to advisory locks on PostgreSQL: sessions, their end, the server's queue."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

import psycopg
import pytest

import holdfast
from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.contract import Glancing, Settings
from holdfast.core.drive import run_now
from holdfast.errors import Unsupported
from holdfast.io.clock import now
from holdfast.io.runtime_aio import AsyncioRuntime
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.postgres.advisory_sql import base_key
from holdfast.stores.postgres_advisory.backend import PostgresAdvisoryBackend
from holdfast.url import open_store
from servers.postgres import PostgresServer
from servers.proxy import Proxy
from servers.registry import Servers
from stores.claims import claim_of
from stores.postgres import helpers
from stores.postgres.helpers import Admin

SOON = 20.0
HOLDING = "SELECT count(*) FROM holdfast.keys WHERE key = %s AND granted"

server, admin = helpers.server, helpers.admin


@pytest.fixture
def url(server: PostgresServer) -> str:
    return f"{server.url}?mode=advisory"


@pytest.fixture
def backend(url: str, namespace: str) -> Iterator[PostgresAdvisoryBackend]:
    made = open_store(url, Settings(namespace=namespace)).backend(BlockingRuntime())
    assert isinstance(made, PostgresAdvisoryBackend)
    yield made
    run_now(made.close())


def one(admin: Admin, sql: str, *parameters: object) -> object:
    row = admin.execute(sql.encode(), parameters).fetchone()
    assert row is not None
    return row[0]


def claim(name: str = "name", ttl: float = 30.0, mode: Mode = Mode.EXCLUSIVE) -> Claim:
    return claim_of(name, mode, limit=2 if mode is Mode.SLOTS else 0, ttl=ttl)


def take(backend: PostgresAdvisoryBackend, wanted: Claim) -> Grant:
    answer = run_now(backend.attempt(wanted, join=True))
    assert isinstance(answer, Grant)
    return answer


def eventually(check: object, what: str) -> None:
    assert callable(check)
    deadline = now() + SOON
    while not check():
        assert now() < deadline, what
        time.sleep(0.01)


def pid_of(backend: PostgresAdvisoryBackend, wanted: Claim) -> int:
    return backend.sessions.by_owner[wanted.owner].connection.pid


def test_a_terminated_holder_is_lost(
    backend: PostgresAdvisoryBackend, admin: Admin, namespace: str
) -> None:
    """pg_terminate_backend on the holding session: noticed without a request, and final."""
    wanted = claim()
    grant = take(backend, wanted)
    assert isinstance(backend, Glancing)
    assert backend.glance([grant]) == {}
    one(admin, "SELECT pg_terminate_backend(%s, 5000)", pid_of(backend, wanted))
    eventually(lambda: wanted.owner in backend.glance([grant]), "the end was not noticed")
    assert one(admin, HOLDING, base_key(namespace, "name")) == 0
    renewal = run_now(backend.renew([grant], [], until=now() + 5))
    assert list(renewal.lost) == [wanted.owner]
    assert run_now(backend.release(grant)) is False
    assert take(backend, claim()).token > grant.token


def test_a_terminated_waiter_waits_on(backend: PostgresAdvisoryBackend, admin: Admin) -> None:
    """pg_terminate_backend on a waiting session: the waiter queues again and gets the lock."""
    grant = take(backend, claim())
    waiter = claim()
    assert isinstance(run_now(backend.attempt(waiter, join=True)), Busy)
    first = pid_of(backend, waiter)
    one(admin, "SELECT pg_terminate_backend(%s, 5000)", first)
    run_now(backend.wait(waiter, Busy(0), now() + SOON))
    assert isinstance(run_now(backend.attempt(waiter, join=True)), Busy)
    assert pid_of(backend, waiter) != first
    assert run_now(backend.release(grant))
    run_now(backend.wait(waiter, Busy(0), now() + SOON))
    assert take(backend, waiter).token > grant.token


def test_an_abandoned_waiter_leaves_the_server_s_queue(
    backend: PostgresAdvisoryBackend, admin: Admin, namespace: str
) -> None:
    """A wait that is given up is cancelled on the server, and its session is used again."""
    grant = take(backend, claim())
    waiter = claim()
    assert isinstance(run_now(backend.attempt(waiter, join=True)), Busy)
    pid = pid_of(backend, waiter)
    queued = "SELECT count(*) FROM holdfast.keys WHERE key = %s AND NOT granted"
    eventually(lambda: one(admin, queued, base_key(namespace, "name")) == 1, "it never waited")
    run_now(backend.abandon(waiter))
    assert one(admin, queued, base_key(namespace, "name")) == 0
    assert [session.connection.pid for session in backend.sessions.idle] == [pid]
    assert run_now(backend.look("name")).waiters == ()
    assert run_now(backend.release(grant))


def test_the_server_ends_a_silent_hold(
    backend: PostgresAdvisoryBackend, admin: Admin, namespace: str
) -> None:
    """A holder that does not renew loses it to the server after its ttl, not before."""
    began = now()
    grant = take(backend, claim(ttl=0.6))
    key = base_key(namespace, "name")
    eventually(lambda: one(admin, HOLDING, key) == 0, "the hold never ended")
    assert now() - began >= 0.6
    assert list(run_now(backend.renew([grant], [], until=now() + 5)).lost)


def test_many_renewals_are_sent_at_once(servers: Servers, namespace: str) -> None:
    """Many holds are renewed in the time of one round trip of a slow network."""
    server = servers.of(PostgresServer, settings={"max_connections": "150"})
    proxy = Proxy(server)
    settings = Settings(namespace=namespace, request_seconds=60)
    store = open_store(f"{proxy.url}?mode=advisory", settings)
    backend = store.backend(BlockingRuntime())
    assert isinstance(backend, PostgresAdvisoryBackend)
    try:  # their ttl is long: on a busy machine it takes a while to open so many sessions
        grants = [take(backend, claim(f"name {number}", ttl=3600)) for number in range(100)]
        proxy.delay(0.1)
        began = now()
        renewal = run_now(backend.renew(grants, [], until=now() + 60))
        assert (renewal.lost, renewal.unknown) == ({}, {})
        assert now() - began < 100 * 0.2  # one after the other would take this and more
    finally:
        proxy.heal()
        run_now(backend.close())
        proxy.close()


def test_a_late_renewal_is_unknown_and_goes_on(server: PostgresServer, namespace: str) -> None:
    """A late reply makes the hold unknown for now; the next renewal succeeds."""
    proxy = Proxy(server)
    store = open_store(f"{proxy.url}?mode=advisory", Settings(namespace=namespace))
    backend = store.backend(BlockingRuntime())
    assert isinstance(backend, PostgresAdvisoryBackend)
    try:
        wanted = claim()
        grant = take(backend, wanted)
        proxy.stall()
        assert list(run_now(backend.renew([grant], [], until=now() + 0.3)).unknown) == [
            wanted.owner
        ]
        proxy.resume()
        renewal = run_now(backend.renew([grant], [], until=now() + 5))
        assert (renewal.lost, renewal.unknown) == ({}, {})
        assert run_now(backend.release(grant)) is True
    finally:
        run_now(backend.close())
        proxy.close()


def test_a_session_of_unknown_state_is_ended_on_the_server(
    backend: PostgresAdvisoryBackend, admin: Admin, namespace: str
) -> None:
    """The session of a broken connection is ended before its claim is forgotten."""
    wanted = claim()
    take(backend, wanted)
    session = backend.sessions.by_owner[wanted.owner]
    fileno = session.connection.fileno()
    kept = os.dup(fileno)  # the server does not notice the client's end
    with Path(os.devnull).open("r+b") as nothing:
        os.dup2(nothing.fileno(), fileno)
    backend.sessions.lose(wanted.owner, session)
    assert one(admin, HOLDING, base_key(namespace, "name")) == 1
    run_now(backend.abandon(wanted))
    assert one(admin, HOLDING, base_key(namespace, "name")) == 0
    os.close(kept)


def test_a_session_never_takes_a_key_twice(
    backend: PostgresAdvisoryBackend, url: str, namespace: str
) -> None:
    """Advisory locks are re-entrant within a session: a session that holds is never used twice."""
    store = open_store(url, Settings(namespace=namespace))
    other = store.backend(BlockingRuntime())
    assert isinstance(other, PostgresAdvisoryBackend)
    for _ in range(3):
        first = take(backend, claim())
        assert isinstance(run_now(backend.attempt(claim(), join=False)), Busy)
        assert isinstance(run_now(other.attempt(claim(), join=False)), Busy)
        assert run_now(backend.release(first))
        second = take(other, claim())
        assert run_now(other.release(second))
    run_now(other.close())


def test_a_collision_of_keys_is_refused(
    backend: PostgresAdvisoryBackend, admin: Admin, namespace: str
) -> None:
    """Two names with one key would be one lock: the second is refused."""
    run_now(backend.release(take(backend, claim("other"))))
    forged = "UPDATE holdfast.counter SET base = %s WHERE namespace = %s AND name = 'other'"
    admin.execute(forged, (base_key(namespace, "name"), namespace))
    with pytest.raises(Unsupported, match="key of 'name'"):
        run_now(backend.attempt(claim(), join=True))
    key = base_key(namespace, "name")
    eventually(lambda: one(admin, HOLDING, key) == 0, "the refused lock is still held")


def test_outdated_rows_are_not_shown(
    backend: PostgresAdvisoryBackend, admin: Admin, namespace: str
) -> None:
    """``look`` shows only sessions that have the key now."""
    for mode in (Mode.EXCLUSIVE, Mode.SHARED):
        wanted = claim(mode=mode)
        grant = take(backend, wanted)
        assert [holder.token for holder in run_now(backend.look("name")).holders] == [grant.token]
        one(admin, "SELECT pg_terminate_backend(%s, 5000)", pid_of(backend, wanted))
        assert run_now(backend.look("name")).holders == ()
        stored = "SELECT cardinality(holders) FROM holdfast.counter WHERE namespace = %s"
        assert one(admin, stored, namespace) != 0


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.SHARED])
def test_an_old_hold_of_the_session_is_not_shown(
    backend: PostgresAdvisoryBackend,
    server: PostgresServer,
    admin: Admin,
    namespace: str,
    mode: Mode,
) -> None:
    """A session that takes the name again has its key before its row is updated."""
    assert run_now(backend.release(take(backend, claim(mode=mode))))
    again: list[Grant] = []
    thread = threading.Thread(target=lambda: again.append(take(backend, claim(mode=mode))))
    key = base_key(namespace, "name")
    with psycopg.connect(server.url) as slow:
        slow.execute("SELECT FROM holdfast.counter WHERE namespace = %s FOR UPDATE", (namespace,))
        thread.start()
        eventually(lambda: one(admin, HOLDING, key) == 1, "the key was not taken")
        assert run_now(backend.look("name")).holders == ()
    thread.join(SOON)
    assert [holder.token for holder in run_now(backend.look("name")).holders] == [again[0].token]


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.SHARED])
@pytest.mark.parametrize("old", [False, True])
def test_a_waiter_is_woken_with_its_grant(
    server: PostgresServer, backend: PostgresAdvisoryBackend, namespace: str, mode: Mode, old: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The server ends a hold one ttl after the grant, which may be as old as the request that
    waited: its time counts from there. A grant that may be too old is renewed first."""
    if old:
        monkeypatch.setattr("holdfast.stores._sql.advisory.FRESH_SHARE", 0.0)
    with Proxy(server) as proxy:
        store = open_store(f"{proxy.url}?mode=advisory", Settings(namespace=namespace))
        waiter = store.backend(BlockingRuntime())
        assert isinstance(waiter, PostgresAdvisoryBackend)
        held, wanted = take(backend, claim()), claim(mode=mode)
        busy = run_now(waiter.attempt(wanted, join=True))
        queued_at = now()
        assert isinstance(busy, Busy)
        eventually(lambda: len(run_now(backend.look("name")).waiters) == 1, "it does not wait")
        proxy.reset_counts()
        assert run_now(backend.release(held))
        run_now(waiter.wait(wanted, busy, now() + SOON))
        grant = take(waiter, wanted)
        assert grant.token > held.token
        assert proxy.counts.requests == old
        assert grant.since is None if old else (grant.since or inf) <= queued_at
        assert [holder.token for holder in run_now(backend.look("name")).holders] == [grant.token]
        assert run_now(backend.look("name")).waiters == ()
        assert run_now(waiter.release(grant))
        run_now(waiter.close())


def test_a_slot_of_a_killed_holder_is_found(backend: PostgresAdvisoryBackend, admin: Admin) -> None:
    """A killed holder sends no wake-up; the first waiter polls."""
    held = [claim(mode=Mode.SLOTS) for _ in range(2)]
    for wanted in held:
        take(backend, wanted)
    waiter = claim(mode=Mode.SLOTS)
    answer = run_now(backend.attempt(waiter, join=True))
    one(admin, "SELECT pg_terminate_backend(%s, 5000)", pid_of(backend, held[0]))
    deadline = now() + SOON
    while isinstance(answer, Busy):
        assert now() < deadline
        retry = SOON if answer.retry_seconds is None else answer.retry_seconds
        run_now(backend.wait(waiter, answer, now() + retry))
        answer = run_now(backend.attempt(waiter, join=True))
    assert answer.slots == (0,)


def test_old_counters_are_purged_unless_held(
    backend: PostgresAdvisoryBackend, admin: Admin, namespace: str
) -> None:
    """Counters that were not used for a week are deleted; those of held names stay."""
    run_now(backend.release(take(backend, claim("old"))))
    take(backend, claim("held"))
    age = "UPDATE holdfast.counter SET used = used - interval '8 days' WHERE namespace = %s"
    admin.execute(age, (namespace,))
    assert one(admin, "SELECT holdfast.purge_counters(%s, '', 10)", namespace) is None
    names = "SELECT array_agg(name) FROM holdfast.counter WHERE namespace = %s"
    assert one(admin, names, namespace) == ["held"]


def test_the_loop_is_never_blocked_by_the_renewer(url: str, namespace: str) -> None:
    """A session that the renewer uses is waited for in a thread, not on the loop."""

    async def body() -> None:
        store = open_store(url, Settings(namespace=namespace))
        backend = store.backend(AsyncioRuntime())
        assert isinstance(backend, PostgresAdvisoryBackend)
        wanted = claim()
        grant = await backend.attempt(wanted, join=True)
        assert isinstance(grant, Grant)
        mutex = backend.sessions.by_owner[wanted.owner].mutex
        mutex.acquire()
        releasing = asyncio.create_task(backend.release(grant))
        await asyncio.sleep(0.05)
        assert not releasing.done()
        mutex.release()
        assert await releasing is True
        await backend.close()

    asyncio.run(body())


def test_200_holds_wait_and_end_in_threads(servers: Servers, namespace: str) -> None:
    """Many threads, few names: the server's queue serves all of them."""
    server = servers.of(PostgresServer)
    served: list[tuple[str, int]] = []
    with holdfast.connect(f"{server.url}?mode=advisory", namespace=namespace) as locks:

        def work(number: int) -> None:
            with locks.lock(f"name {number % 5}", timeout=60) as lease:
                served.append((lease.name, lease.token))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(served)) == 200
