"""The connection on which a client listens; the blocking one asks over it while nobody waits."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
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
from holdfast.stores.postgres.backend import PostgresLeaseBackend
from holdfast.stores.postgres.wakeups import BlockingPostgresWakeups, SharedSubscription
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench, Peer
from holdfast.url import open_store
from servers.postgres import PostgresServer
from servers.process import wait_until
from stores.claims import claim_of
from stores.postgres import bench as postgres_bench
from stores.postgres.bench import Admin, listens_by, over

SECONDS = 60.0

server, admin = postgres_bench.server, postgres_bench.admin


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


def stand(backend: Backend, claim: Claim) -> Busy:
    """In line, where it can be woken: the first wait only begins to listen."""
    busy = queue(backend, claim)
    assert run_now(backend.wait(claim, busy, listens_by(busy))) is None
    return queue(backend, claim)


def sessions(admin: Admin, name: str) -> list[int]:
    rows = admin.execute("SELECT pid FROM pg_stat_activity WHERE application_name = %s", (name,))
    return [int(str(pid)) for (pid,) in rows]


def end(admin: Admin, name: str) -> None:
    admin.execute(
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = %s",
        (name,),
    )
    assert not sessions(admin, name)


def test_one_who_comes_alone_needs_one_connection(
    admin: Admin, ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """It waits, is woken, looks, releases and waits again on the same one."""
    held = take(theirs, claim_of())
    used: set[int] = set()
    for _ in range(3):
        claim = claim_of()
        busy = stand(ours, claim)
        assert run_now(theirs.release(held))
        run_now(ours.wait(claim, busy, now() + SECONDS))
        grant = take(ours, claim)
        used.update(sessions(admin, namespace))
        after = claim_of()
        stand(theirs, after)
        assert run_now(ours.release(grant))
        held = take(theirs, after)
    assert len(used) == 1


def test_others_ask_elsewhere_while_somebody_waits(
    admin: Admin, ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """And the one who waits is woken all the same."""
    held = take(theirs, claim_of())
    claim = claim_of()
    busy = stand(ours, claim)
    waits = threading.Thread(target=lambda: run_now(ours.wait(claim, busy, now() + SECONDS)))
    waits.start()
    try:
        while not ours.wakeups._waiting:  # type: ignore[attr-defined]
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


def test_a_ring_that_comes_with_an_answer_is_kept(
    ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend
) -> None:
    """A request reads the message: whoever waits after it is woken at once, with the grant."""
    first = take(ours, claim_of())
    waiting = claim_of()
    stand(theirs, waiting)
    assert run_now(ours.release(first))
    held = take(theirs, waiting)
    claim = claim_of()
    busy = stand(ours, claim)
    assert run_now(theirs.release(held))
    while not ours.wakeups._subscription.tokens:  # type: ignore[attr-defined]
        run_now(ours.look("name"))  # over the connection that listens
    brought = run_now(ours.wait(claim, busy, now() + SECONDS))
    assert brought is not None
    assert brought.token > held.token


def test_it_may_end_while_nobody_waits(
    admin: Admin, ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """The next request goes over another, and the next wait listens on another."""
    held = take(theirs, claim_of())
    claim = claim_of()
    busy = stand(ours, claim)
    for _ in range(2):
        end(admin, namespace)
        assert [each.token for each in run_now(ours.look("name")).holders] == [held.token]
        busy = stand(ours, claim)
    assert run_now(theirs.release(held))
    run_now(ours.wait(claim, busy, now() + SECONDS))
    assert take(ours, claim).token > held.token


def test_it_may_end_while_somebody_waits(
    admin: Admin, ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """The wait ends early, and the next one listens on another."""
    held = take(theirs, claim_of())
    claim = claim_of()
    busy = stand(ours, claim)
    told: list[Grant | None] = []

    def wait() -> None:
        told.append(run_now(ours.wait(claim, busy, now() + SECONDS)))

    waits = threading.Thread(target=wait)
    waits.start()
    while not ours.wakeups._waiting:  # type: ignore[attr-defined]
        threading.Event().wait(0.001)
    end(admin, namespace)
    waits.join(SECONDS / 2)
    assert told == [None]
    busy = stand(ours, claim)
    assert run_now(theirs.release(held))
    run_now(ours.wait(claim, busy, now() + SECONDS))
    take(ours, claim)


def test_all_who_wait_look_again_when_it_ends(
    admin: Admin, ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """Not just the one who listens for them: it may be granted its name, and never wait again."""
    told: list[str] = []

    def wait(claim: Claim, busy: Busy) -> None:
        run_now(ours.wait(claim, busy, now() + 2 * SECONDS))
        told.append(claim.name)

    names = ["one", "other"]
    for name in names:
        take(theirs, claim_of(name))
    claims = [claim_of(name) for name in names]
    stand(ours, claims[0])
    work = [(claim, queue(ours, claim)) for claim in claims]
    waits = [threading.Thread(target=wait, args=each, daemon=True) for each in work]
    for thread in waits:
        thread.start()
    wait_until("both", lambda: len(ours.wakeups._made._waiting) == 2)  # type: ignore[attr-defined]
    end(admin, namespace)
    for thread in waits:
        thread.join(SECONDS)
    assert sorted(told) == names


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("broken", [False, True], ids=["hung", "hung anew"])
def test_a_ring_from_before_it_was_hung_is_not_waited_for(
    server: PostgresServer, admin: Admin, flavour: Flavour, broken: bool
) -> None:
    """By another thread or task of the client: who was told to wait before that asks again."""

    async def body(bench: Bench) -> None:
        url = f"{server.url}?application_name={bench.namespace}"
        settings = Settings(namespace=bench.namespace)
        ours, theirs = Peer(open_store(url, settings), flavour, bench.workers), bench.peer()
        try:
            one, other = [await theirs.take(bench.claim(name)) for name in ("one", "other")]
            hangs, late = bench.claim("one"), bench.claim("other")
            if broken:
                await ours.wait(hangs, await ours.queue(hangs), now() + SECONDS)
            told, busy = await ours.queue(hangs), await ours.queue(late)
            if broken:
                end(admin, bench.namespace)
            assert await theirs.release(other)
            listening, hung = ours.backend.wakeups, 1 + broken  # type: ignore[attr-defined]
            async with asyncio.timeout(SECONDS):
                while listening.generation != hung:
                    await ours.wait(hangs, told, now() + SECONDS)
                await ours.wait(late, busy, now() + 2 * SECONDS)
            await ours.take(late)
            assert await theirs.release(one)
        finally:
            await ours.close()

    over(server.url, flavour, body)


def test_a_ring_from_just_before_it_was_hung_is_not_waited_for(
    admin: Admin, ours: PostgresLeaseBackend, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """The same as late as can be, in the moment before the thread begins to listen."""
    source, first = inspect.getsourcelines(BlockingPostgresWakeups.wait)
    (line,) = [first + at for at, text in enumerate(source) if "hub.wait(" in text]
    take(theirs, claim_of("one"))
    held, hangs, late = take(theirs, claim_of("other")), claim_of("one"), claim_of("other")
    told = stand(ours, hangs)
    busy = queue(ours, late)

    def hang_another() -> None:
        end(admin, namespace)
        assert run_now(theirs.release(held))
        wait_until("the end", lambda: not ours.wakeups._subscription._connection.is_alive())  # type: ignore[attr-defined]
        while ours.wakeups.generation == 1:
            run_now(ours.wait(hangs, told, now() + SECONDS))

    def wait() -> None:
        work = partial(run_now, ours.wait(late, busy, now() + 2 * SECONDS))
        handled_at(BlockingPostgresWakeups.wait.__code__, line, work, hang_another)

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    waits.join(SECONDS)
    assert not waits.is_alive()
    assert ours.wakeups.generation == 2
    take(ours, late)


@pytest.mark.parametrize(
    ("name", "line"), [*lines_of(SharedSubscription.request), *lines_of(SharedSubscription._send)]
)
def test_an_interrupt_of_a_request_loses_no_ring(
    admin: Admin,
    ours: PostgresLeaseBackend,
    theirs: PostgresLeaseBackend,
    namespace: str,
    name: str,
    line: int,
) -> None:
    """One that comes with the answer; nor does it leave the connection open in the end."""
    held = take(theirs, claim_of())
    claim = claim_of()
    busy = stand(ours, claim)
    subscription = ours.wakeups._subscription  # type: ignore[attr-defined]
    assert run_now(theirs.release(held))
    wait_until("the ring", subscription._connection.has_input)
    torn_at(getattr(SharedSubscription, name).__code__, line, lambda: run_now(ours.look("name")))
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
    """Over the connection on which it would listen: it looks when its time is over."""
    take(theirs, claim_of())
    claim = claim_of()
    busy = stand(ours, claim)
    told: list[Grant | None] = []
    handling = threading.Event()

    def handle(*_: object) -> None:
        handling.set()
        told.append(run_now(ours.wait(claim, busy, now() + 1.0)))

    def strike() -> None:
        blocked = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        while True:
            row = admin.execute(blocked + " AND wait_event_type = 'Lock'", (namespace,)).fetchone()
            if row == (1,):
                break
        os.kill(os.getpid(), signal.SIGUSR1)
        assert handling.wait(SECONDS)
        other.rollback()  # now the answer comes, while the handler waits

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
    assert told == [None]


def test_a_client_with_one_connection_can_wait_and_release(
    server: PostgresServer, theirs: PostgresLeaseBackend, namespace: str
) -> None:
    """The one that listens is beside those that are allowed for requests."""
    settings = Settings(namespace=namespace, connections=1)
    single = open_store(server.url, settings).backend(BlockingRuntime())
    held = take(theirs, claim_of())
    other = run_now(single.attempt(claim_of("other"), join=True))
    assert isinstance(other, Grant)
    claim = claim_of()
    busy = stand(single, claim)
    waits = threading.Thread(target=lambda: run_now(single.wait(claim, busy, now() + SECONDS)))
    waits.start()
    assert run_now(single.release(other))
    assert run_now(theirs.release(held))
    waits.join(SECONDS)
    assert isinstance(run_now(single.attempt(claim, join=True)), Grant)
    run_now(single.close())
