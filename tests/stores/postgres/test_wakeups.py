"""The connection that listens. A blocking client also sends requests over it while none waits."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial

import psycopg
import pytest

from hazards.tearing import handled_at, lines_of, torn_at
from holdfast.claim import Busy, Claim, Grant
from holdfast.core.contract import Backend, Settings
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.io.wakeups import Wakeups
from holdfast.stores.postgres.backend import PostgresLeaseBackend
from holdfast.stores.postgres.wakeups import SharedListener, wakeup_key
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench, Peer
from holdfast.url import open_store
from servers.postgres import PostgresServer
from servers.process import wait_until
from stores.claims import claim_of
from stores.postgres import helpers
from stores.postgres.helpers import Admin, run_with_bench, subscribe_by

SECONDS = 60.0

server, admin = helpers.server, helpers.admin


@pytest.fixture
def ours(server: PostgresServer, namespace: str) -> Iterator[PostgresLeaseBackend]:
    yield from _backend(f"{server.url}?application_name={namespace}", namespace)


@pytest.fixture
def theirs(server: PostgresServer, namespace: str) -> Iterator[PostgresLeaseBackend]:
    yield from _backend(server.url, namespace)


def _backend(url: str, namespace: str) -> Iterator[PostgresLeaseBackend]:
    made = open_store(url, Settings(namespace=namespace)).backend(BlockingRuntime())
    assert isinstance(made, PostgresLeaseBackend)
    yield made
    run_now(made.close())


def take(backend: PostgresLeaseBackend, claim: Claim) -> Grant:
    answer = run_now(backend.attempt(claim, join=True))
    assert isinstance(answer, Grant)
    return answer


def queue(backend: Backend, claim: Claim) -> Busy:
    answer = run_now(backend.attempt(claim, join=True))
    assert isinstance(answer, Busy)
    return answer


def enqueue(backend: Backend, claim: Claim) -> Busy:
    """Queues a claim and subscribes, so that it can be woken: the first wait only subscribes."""
    busy = queue(backend, claim)
    assert run_now(backend.wait(claim, busy, subscribe_by(busy))) is None
    return queue(backend, claim)


def listener(backend: PostgresLeaseBackend) -> SharedListener:
    """The connection that listens, and takes requests."""
    found = backend.wakeups._subscription
    assert isinstance(found, SharedListener)
    return found


def sessions(admin: Admin, name: str) -> list[int]:
    rows = admin.execute("SELECT pid FROM pg_stat_activity WHERE application_name = %s", (name,))
    return [int(str(pid)) for (pid,) in rows]


def end(admin: Admin, name: str) -> None:
    admin.execute(
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = %s",
        (name,),
    )
    assert not sessions(admin, name)


def test_one_thread_needs_one_connection(
    admin: Admin, ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """It waits, is woken, attempts, releases and waits again on the same connection."""
    held = take(theirs, claim_of())
    used: set[int] = set()
    for _ in range(3):
        claim = claim_of()
        busy = enqueue(ours, claim)
        assert run_now(theirs.release(held))
        run_now(ours.wait(claim, busy, now() + SECONDS))
        grant = take(ours, claim)
        used.update(sessions(admin, namespace))
        after = claim_of()
        enqueue(theirs, after)
        assert run_now(ours.release(grant))
        held = take(theirs, after)
    assert len(used) == 1


def test_requests_use_other_connections_while_a_thread_waits(
    admin: Admin, ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """And the waiting thread is woken."""
    held = take(theirs, claim_of())
    claim = claim_of()
    busy = enqueue(ours, claim)
    waits = threading.Thread(target=lambda: run_now(ours.wait(claim, busy, now() + SECONDS)))
    waits.start()
    try:
        while not ours.wakeups.waiting:
            threading.Event().wait(0.001)
        for _ in range(20):
            other = take(ours, claim_of("other"))
            assert run_now(ours.release(other))
        assert len(sessions(admin, namespace)) == 2
        assert waits.is_alive()
    finally:
        assert run_now(theirs.release(held))
        waits.join(SECONDS)
    assert not waits.is_alive()
    take(ours, claim)


def test_a_wake_up_that_arrives_with_a_reply_is_kept(
    ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend
) -> None:
    """A request reads the notification: the next wait returns at once, with the direct grant."""
    first = take(ours, claim_of())
    waiting = claim_of()
    enqueue(theirs, waiting)
    assert run_now(ours.release(first))
    held = take(theirs, waiting)
    claim = claim_of()
    busy = enqueue(ours, claim)
    assert run_now(theirs.release(held))
    while not listener(ours).values:
        run_now(ours.look("name"))  # over the connection that listens
    brought = run_now(ours.wait(claim, busy, now() + SECONDS))
    assert brought is not None
    assert brought.token > held.token


def test_the_connection_may_end_while_no_thread_waits(
    admin: Admin, ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """The next request uses another one, and the next wait listens on another one."""
    held = take(theirs, claim_of())
    claim = claim_of()
    busy = enqueue(ours, claim)
    for _ in range(2):
        end(admin, namespace)
        assert [each.token for each in run_now(ours.look("name")).holders] == [held.token]
        busy = enqueue(ours, claim)
    assert run_now(theirs.release(held))
    run_now(ours.wait(claim, busy, now() + SECONDS))
    assert take(ours, claim).token > held.token


def test_a_wake_up_that_is_read_together_with_a_reply_is_kept(
    ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads is late: the wake-up is in its buffer behind the reply."""
    held = take(theirs, claim_of())
    claim = claim_of()
    busy = enqueue(ours, claim)
    connection = listener(ours).connection
    collect = connection.collect

    def collect_late() -> None:
        monkeypatch.setattr(connection, "collect", collect)
        assert run_now(theirs.release(held))
        wait_until("the wake-up", lambda: wakeup_key(claim.owner) in _received(connection.fd))
        collect()

    monkeypatch.setattr(connection, "collect", collect_late)
    run_now(ours.look("name"))  # over the connection that listens
    assert connection.collect is collect
    assert run_now(ours.wait(claim, busy, now() + SECONDS / 6)) is not None


def _received(fd: int) -> bytes:
    """Returns what has come and was not read."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        return sock.recv(65536, socket.MSG_PEEK)


def test_the_connection_may_end_while_a_thread_waits(
    admin: Admin, ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """The wait ends early, and the next one listens on another connection."""
    held = take(theirs, claim_of())
    claim = claim_of()
    busy = enqueue(ours, claim)
    results: list[Grant | None] = []

    def wait() -> None:
        results.append(run_now(ours.wait(claim, busy, now() + SECONDS)))

    waits = threading.Thread(target=wait)
    waits.start()
    while not ours.wakeups.waiting:
        threading.Event().wait(0.001)
    end(admin, namespace)
    waits.join(SECONDS / 2)
    assert results == [None]
    busy = enqueue(ours, claim)
    assert run_now(theirs.release(held))
    run_now(ours.wait(claim, busy, now() + SECONDS))
    take(ours, claim)


def test_all_waiters_attempt_again_when_the_connection_ends(
    admin: Admin, ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """Not only the thread that reads for all: it may get its grant, and never wait again."""
    results: list[str] = []

    def wait(claim: Claim, busy: Busy) -> None:
        run_now(ours.wait(claim, busy, now() + 2 * SECONDS))
        results.append(claim.name)

    names = ["one", "other"]
    for name in names:
        take(theirs, claim_of(name))
    claims = [claim_of(name) for name in names]
    enqueue(ours, claims[0])
    work = [(claim, queue(ours, claim)) for claim in claims]
    waits = [threading.Thread(target=wait, args=each, daemon=True) for each in work]
    for thread in waits:
        thread.start()
    wait_until("both", lambda: len(ours.wakeups._hub._waiting) == 2)  # type: ignore[attr-defined]
    end(admin, namespace)
    for thread in waits:
        thread.join(SECONDS)
    assert sorted(results) == names


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("broken", [False, True], ids=["first", "second"])
def test_a_wait_from_before_the_subscription_returns_at_once(
    server: PostgresServer, admin: Admin, flavour: Flavour, broken: bool
) -> None:
    """Another thread or task has subscribed: a claim that was busy before that attempts again."""

    async def body(bench: Bench) -> None:
        url = f"{server.url}?application_name={bench.namespace}"
        settings = Settings(namespace=bench.namespace)
        ours, theirs = Peer(open_store(url, settings), flavour, bench.workers), bench.peer()
        try:
            one, other = [await theirs.take(bench.claim(name)) for name in ("one", "other")]
            first_claim, late = bench.claim("one"), bench.claim("other")
            if broken:
                await ours.wait(first_claim, await ours.queue(first_claim), now() + SECONDS)
            first_busy, busy = await ours.queue(first_claim), await ours.queue(late)
            if broken:
                end(admin, bench.namespace)
            assert await theirs.release(other)
            wakeups, generation = ours.backend.wakeups, 1 + broken  # type: ignore[attr-defined]
            async with asyncio.timeout(SECONDS):
                while wakeups.generation != generation:
                    await ours.wait(first_claim, first_busy, now() + SECONDS)
                await ours.wait(late, busy, now() + 2 * SECONDS)
            await ours.take(late)
            assert await theirs.release(one)
        finally:
            await ours.close()

    run_with_bench(server.url, flavour, body)


def test_a_wait_from_just_before_the_subscription_returns_at_once(
    admin: Admin, ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """The same as late as possible: in the moment before the thread waits."""
    source, first = inspect.getsourcelines(Wakeups._wait_on)
    (line,) = [first + at for at, text in enumerate(source) if "hub.waited(" in text]
    take(theirs, claim_of("one"))
    held, first_claim, late = take(theirs, claim_of("other")), claim_of("one"), claim_of("other")
    first_busy = enqueue(ours, first_claim)
    busy = queue(ours, late)

    def subscribe_again() -> None:
        end(admin, namespace)
        assert run_now(theirs.release(held))
        wait_until("the end", lambda: not listener(ours).connection.is_alive())
        while ours.wakeups.generation != 2:
            run_now(ours.wait(first_claim, first_busy, now() + SECONDS))

    def wait() -> None:
        work = partial(run_now, ours.wait(late, busy, now() + 2 * SECONDS))
        handled_at(Wakeups._wait_on.__code__, line, work, subscribe_again)

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    waits.join(SECONDS)
    assert not waits.is_alive()
    assert ours.wakeups.generation == 2
    take(ours, late)


@pytest.mark.parametrize(
    ("name", "line"), [*lines_of(SharedListener.request), *lines_of(SharedListener._send)]
)
def test_an_interrupt_of_a_request_loses_no_wake_up(
    admin: Admin,
    ours: PostgresLeaseBackend,
    theirs: PostgresLeaseBackend,
    namespace: str,
    name: str,
    line: int,
) -> None:
    """Even one that arrives with the reply; and the connection is closed in the end."""
    held = take(theirs, claim_of())
    claim = claim_of()
    busy = enqueue(ours, claim)
    subscription = listener(ours)
    assert run_now(theirs.release(held))
    wait_until("the wake-up", subscription.connection.has_input)
    torn_at(getattr(SharedListener, name).__code__, line, lambda: run_now(ours.look("name")))
    waits = threading.Thread(
        target=lambda: run_now(ours.wait(claim, busy, now() + 2 * SECONDS)), daemon=True
    )
    waits.start()
    waits.join(SECONDS)
    assert not waits.is_alive()
    take(ours, claim)
    run_now(ours.close())
    wait_until("the end", lambda: not sessions(admin, namespace))


def test_a_signal_handler_may_wait_in_the_middle_of_a_request(
    server: PostgresServer,
    admin: Admin,
    ours: PostgresLeaseBackend,
    theirs: PostgresLeaseBackend,
    namespace: str,
) -> None:
    """The request uses the connection that listens: the handler's wait ends at its deadline."""
    take(theirs, claim_of())
    claim = claim_of()
    busy = enqueue(ours, claim)
    results: list[Grant | None] = []
    handling = threading.Event()

    def handle(*_: object) -> None:
        handling.set()
        results.append(run_now(ours.wait(claim, busy, now() + 1.0)))

    def strike() -> None:
        blocked = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        while True:
            row = admin.execute(blocked + " AND wait_event_type = 'Lock'", (namespace,)).fetchone()
            if row == (1,):
                break
        os.kill(os.getpid(), signal.SIGUSR1)
        assert handling.wait(SECONDS)
        other.rollback()  # now the reply arrives, while the handler waits

    with psycopg.connect(server.url) as other:
        other.execute("SELECT FROM holdfast.lock WHERE namespace = %s FOR UPDATE", (namespace,))
        before = signal.signal(signal.SIGUSR1, handle)
        thread = threading.Thread(target=strike)
        try:
            thread.start()
            assert isinstance(run_now(ours.attempt(claim, join=True)), Busy)
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, before)
    assert results == [None]


def test_a_client_with_one_connection_can_wait_and_release(
    server: PostgresServer, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """The connection that listens does not count against the limit."""
    settings = Settings(namespace=namespace, connections=1)
    single = open_store(server.url, settings).backend(BlockingRuntime())
    held = take(theirs, claim_of())
    other = run_now(single.attempt(claim_of("other"), join=True))
    assert isinstance(other, Grant)
    claim = claim_of()
    busy = enqueue(single, claim)
    waits = threading.Thread(target=lambda: run_now(single.wait(claim, busy, now() + SECONDS)))
    waits.start()
    assert run_now(single.release(other))
    assert run_now(theirs.release(held))
    waits.join(SECONDS)
    assert isinstance(run_now(single.attempt(claim, join=True)), Grant)
    run_now(single.close())
