"""Direct grants of lease rows: a release grants with the wake-up. When it counts, and how long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

import holdfast
from holdfast.claim import Claim, Mode
from holdfast.core.contract import DIRECT_GRANT_SECONDS, Settings
from holdfast.io.clock import now
from holdfast.stores.postgres.schema import schema_sql
from holdfast.stores.postgres.wakeups import wakeup_key
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench, Peer
from holdfast.testing.contract.bench import in_grace
from holdfast.url import open_store
from servers.postgres import PostgresServer
from servers.process import wait_until
from stores.claims import claim_of
from stores.postgres import helpers
from stores.postgres.helpers import Admin, enqueue, held, run_with_bench, wakeups_of
from stores.waiting import wait_for_waiter

SECONDS = 60.0
blocking_and_asyncio = pytest.mark.parametrize("flavour", list(Flavour))

server, admin = helpers.server, helpers.admin


@blocking_and_asyncio
@pytest.mark.parametrize("waited", [True, False], ids=["waited", "alone"])
def test_a_release_grants_with_the_wake_up(
    server: PostgresServer, flavour: Flavour, waited: bool
) -> None:
    """For a part of the ttl; another attempt returns the same grant for the whole ttl."""

    async def body(bench: Bench) -> None:
        async def grant_directly(name: str) -> None:
            giver, grant = await held(bench, name, waited=waited)
            theirs, claim = bench.peer(), bench.claim(name)
            busy = await enqueue(theirs, claim)
            assert await giver.release(grant)
            brought = await theirs.wait(claim, busy, now() + SECONDS)
            assert brought is not None
            assert brought.token > grant.token
            assert brought.seconds == DIRECT_GRANT_SECONDS
            info = await giver.look(name)
            assert [holder.token for holder in info.holders] == [brought.token]
            assert info.holders[0].remaining <= DIRECT_GRANT_SECONDS
            assert not info.waiters
            assert (await theirs.take(claim)).token == brought.token
            (holder,) = (await giver.look(name)).holders
            assert holder.token == brought.token
            assert holder.remaining > DIRECT_GRANT_SECONDS
            assert await theirs.release(brought)

        await in_grace(grant_directly)

    run_with_bench(server.url, flavour, body)


@blocking_and_asyncio
def test_a_queue_is_served_by_direct_grants(server: PostgresServer, flavour: Flavour) -> None:
    """Each waiter in order, and the queue is empty in the end."""

    async def body(bench: Bench) -> None:
        async def serve(name: str) -> None:
            giver, grant = await held(bench, name)
            waiting = [(bench.peer(), bench.claim(name)) for _ in range(4)]
            answers = [await enqueue(peer, claim) for peer, claim in waiting]
            assert [answer.place for answer in answers] == [0, 1, 2, 3]
            for (peer, claim), busy in zip(waiting, answers, strict=True):
                assert await giver.release(grant)
                brought = await peer.wait(claim, busy, now() + SECONDS)
                assert brought is not None
                assert brought.token > grant.token
                giver, grant = peer, brought
            assert await giver.release(grant)
            info = await giver.look(name)
            assert not info.holders
            assert not info.waiters

        await in_grace(serve)

    run_with_bench(server.url, flavour, body)


@blocking_and_asyncio
def test_a_direct_grant_is_renewed_and_ended_as_any_hold(
    server: PostgresServer, flavour: Flavour
) -> None:
    """By the renewer, by a release, and by abandoning its claim."""

    async def body(bench: Bench) -> None:
        async def keep(name: str) -> None:
            giver, grant = await held(bench, name)
            theirs, claim = bench.peer(), bench.claim(name)
            busy = await enqueue(theirs, claim)
            assert await giver.release(grant)
            brought = await theirs.wait(claim, busy, now() + SECONDS)
            assert brought is not None
            assert not (await theirs.renew([brought])).lost
            (holder,) = (await giver.look(name)).holders
            assert holder.remaining > DIRECT_GRANT_SECONDS
            next_one = bench.claim(name)
            busy = await enqueue(giver, next_one)
            assert await theirs.release(brought)
            assert not await theirs.release(brought)
            second = await giver.wait(next_one, busy, now() + SECONDS)
            assert second is not None
            await giver.abandon(next_one)
            assert not (await theirs.look(name)).holders

        await in_grace(keep)

    run_with_bench(server.url, flavour, body)


@blocking_and_asyncio
def test_a_wake_up_from_before_the_attempt_is_no_grant(
    server: PostgresServer, admin: Admin, flavour: Flavour
) -> None:
    """It may belong to an earlier direct grant, which has expired or belongs to another owner."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        grant = await ours.take(bench.claim())
        claim = bench.claim()
        busy = await enqueue(theirs, claim)
        ((channel, key),) = wakeups_of(admin, bench.namespace)
        word = key.partition(" ")[0]
        for late in (f"{word} {grant.token}", f"{word} x", word):
            admin.execute("SELECT pg_notify(%s, %s)", (channel, late))
            assert await theirs.wait(claim, busy, now() + SECONDS) is None

    run_with_bench(server.url, flavour, body)


@blocking_and_asyncio
def test_a_waiter_finds_a_direct_grant_whose_wake_up_was_lost(
    server: PostgresServer, admin: Admin, flavour: Flavour
) -> None:
    """The connection that listens was closed, and the notification lost with it."""

    async def body(bench: Bench) -> None:
        async def miss(name: str) -> None:
            giver, grant = await held(bench, name)
            url = f"{server.url}?application_name={bench.namespace}"
            settings = Settings(namespace=bench.namespace)
            theirs = Peer(open_store(url, settings), flavour, bench.workers)
            try:
                claim = bench.claim(name)
                busy = await enqueue(theirs, claim)
                admin.execute(
                    "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
                    " WHERE application_name = %s",
                    (bench.namespace,),
                )
                assert await giver.release(grant)
                assert await theirs.wait(claim, busy, now() + SECONDS) is None
                taken = await theirs.get(claim)
                (holder,) = (await giver.look(name)).holders
                assert (holder.token, taken.claim) == (taken.token, claim)
                assert holder.remaining > DIRECT_GRANT_SECONDS
            finally:
                await theirs.close()

        await in_grace(miss)

    run_with_bench(server.url, flavour, body)


def test_a_waiter_finds_a_direct_grant_whose_wake_up_was_never_sent(
    server: PostgresServer, admin: Admin, namespace: str
) -> None:
    """The session of the release is ended after it has committed the grant, and before it notifies
    the waiter. The waiter's next re-check finds the grant while it lasts; there is one holder."""
    schema = f"s{namespace}"
    admin.execute(_sleeping_after_commit(schema).encode())
    asleep = "FROM pg_stat_activity WHERE application_name = %s AND wait_event = 'PgSleep'"

    def sleeps() -> bool:
        return admin.execute(f"SELECT 1 {asleep}".encode(), (namespace,)).fetchone() is not None

    url = f"{server.url}?schema={schema}"
    with (
        holdfast.connect(f"{url}&application_name={namespace}") as ours,
        holdfast.connect(url) as theirs,
        ThreadPoolExecutor(2) as pool,
    ):
        _subscribe(ours, theirs, pool)
        lease = ours.lock("name", ttl=SECONDS).acquire()
        assert lease is not None
        waiting = pool.submit(theirs.lock("name", ttl=SECONDS).acquire, timeout=SECONDS)
        wait_for_waiter(theirs)
        releasing = pool.submit(lease.release)
        wait_until("the grant is committed", sleeps)
        (holder,) = theirs.inspect("name").holders
        assert holder.token > lease.token
        assert not waiting.done()
        admin.execute(f"SELECT pg_terminate_backend(pid, 60000) {asleep}".encode(), (namespace,))
        taken = waiting.result(SECONDS)
        assert taken is not None
        assert taken.token == holder.token  # not one after the grant has expired
        assert not releasing.result(SECONDS)  # repeated: the hold had ended
        assert [found.token for found in theirs.inspect("name").holders] == [taken.token]
        assert taken.release()


def _subscribe(ours: holdfast.Locks, theirs: holdfast.Locks, pool: ThreadPoolExecutor) -> None:
    """Lets ``theirs`` wait once, as a reader, which is not granted directly."""
    writer = ours.rwlock("other").write().acquire()
    assert writer is not None
    waiting = pool.submit(theirs.rwlock("other").read().acquire, timeout=SECONDS)
    wait_for_waiter(theirs, "other")
    assert writer.release()
    reader = waiting.result(SECONDS)
    assert reader is not None
    assert reader.release()


def _sleeping_after_commit(schema: str) -> str:
    """The schema, with a long sleep between the commit of a direct grant and its notification."""
    text = schema_sql(schema=schema)
    committed = "      COMMIT;\n      done := pg_catalog.set_config('search_path'"
    assert text.count(committed) == 1
    slept = committed.replace("COMMIT;", "COMMIT;\n      PERFORM pg_catalog.pg_sleep(600);")
    return text.replace(committed, slept)


@blocking_and_asyncio
def test_a_direct_grant_that_is_not_renewed_expires(
    server: PostgresServer, flavour: Flavour
) -> None:
    """The waiter gets the wake-up, but neither renews the grant nor attempts again."""

    async def body(bench: Bench) -> None:
        giver, grant = await held(bench)
        frozen, theirs = bench.peer(), bench.peer()
        first, second = bench.claim(ttl=2.0), bench.claim()  # instead of DIRECT_GRANT_SECONDS
        busy = await enqueue(frozen, first)
        await enqueue(theirs, second)
        assert await giver.release(grant)
        # No wake-up for the second: it attempts again when the grant before it may have expired.
        info = await giver.look("name")
        assert sum(holder.remaining for holder in info.holders) <= first.ttl
        taken = await theirs.get(second, SECONDS)
        brought = await frozen.wait(first, busy, now() + SECONDS)
        assert brought is not None
        assert grant.token < brought.token < taken.token
        assert first.owner in (await frozen.renew([brought])).lost
        assert not await frozen.release(brought)
        assert await theirs.release(taken)

    run_with_bench(server.url, flavour, body)


@blocking_and_asyncio
@pytest.mark.parametrize("kind", ["shared", "slots"])
def test_other_modes_are_reserved_and_woken(
    server: PostgresServer, flavour: Flavour, kind: str
) -> None:
    """Shared claims and slots are granted by their own attempt."""

    async def body(bench: Bench) -> None:
        async def reserve(name: str) -> None:
            def claim() -> Claim:
                if kind == "slots":
                    return bench.claim(name, Mode.SLOTS, limit=1)
                return bench.claim(name, Mode.SHARED)

            giver, theirs = bench.peer(), bench.peer()
            before = bench.claim(name) if kind == "shared" else claim()
            grant = await giver.take(before)
            asked = claim()
            busy = await enqueue(theirs, asked)
            assert await giver.release(grant)
            assert await theirs.wait(asked, busy, now() + SECONDS) is None
            assert not (await giver.look(name)).holders
            await theirs.take(asked)

        await in_grace(reserve)

    run_with_bench(server.url, flavour, body)


def test_a_waiter_of_an_older_version_is_woken(server: PostgresServer, namespace: str) -> None:
    """A waiter whose stored ``ring`` has one word gets no token, and its replies are as before."""

    async def body(bench: Bench) -> None:
        giver, grant = await held(bench)
        with psycopg.connect(server.url, autocommit=True) as older:
            older.execute("LISTEN older")
            claim = claim_of()
            asked = (bench.namespace, claim.owner, claim.label)
            row = older.execute(
                "SELECT holdfast.attempt(%s, 'name', %s, 'exclusive', 1, 0, 30, %s,"
                " 'older', 'key', true)",
                asked,
            ).fetchone()
            assert row is not None
            assert len(str(row[0]).split(" ")) == 3
            assert await giver.release(grant)
            payloads = [each.payload for each in older.notifies(timeout=SECONDS, stop_after=1)]
            assert payloads == ["key"]
            assert not (await giver.look("name")).holders

    run_with_bench(server.url, Flavour.BLOCKING, body)


_WAITS = """
import sys, holdfast
locks = holdfast.connect(sys.argv[1], namespace=sys.argv[2])
lease = locks.lock("name").acquire()
print(lease.token, flush=True)
sys.stdin.read()
"""


@pytest.mark.faults
@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "killed"])
def test_a_waiter_that_ends_with_its_grant_is_passed_over(
    server: PostgresServer, admin: Admin, namespace: str, stopped: bool
) -> None:
    """A process that was stopped before its direct grant, or is killed right after it. The ttl is
    far longer than the test, so that nothing else ends its hold."""
    with (
        holdfast.connect(server.url, namespace=namespace, ttl=3600) as ours,
        holdfast.connect(server.url, namespace=namespace, ttl=3600) as theirs,
    ):
        first = theirs.lock("name").acquire()
        assert first is not None
        tokens: list[int] = []

        def work() -> None:
            with ours.lock("name", timeout=SECONDS) as lease:
                tokens.append(lease.token)
                go.wait(SECONDS)
            with ours.lock("name", timeout=SECONDS) as lease:
                tokens.append(lease.token)

        go = threading.Event()
        thread = threading.Thread(target=work)
        thread.start()
        wait_until("the first", lambda: len(wakeups_of(admin, namespace)) == 1)
        words = [sys.executable, "-c", _WAITS, server.url, namespace]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            wait_until("the child", lambda: len(wakeups_of(admin, namespace)) == 2)
            if stopped:
                os.kill(child.pid, signal.SIGSTOP)
            first.release()
            wait_until("our grant", lambda: len(tokens) == 1)
            go.set()  # now it releases to the child, and queues behind it
            if not stopped:
                assert child.stdout is not None
                assert int(child.stdout.readline()) > tokens[0]
            child.kill()
        thread.join(SECONDS)
        assert len(tokens) == 2
        assert tokens[1] > tokens[0]


@pytest.mark.parametrize("renew", [True, False])
def test_a_direct_grant_lasts_as_long_as_any_hold(
    server: PostgresServer, admin: Admin, namespace: str, renew: bool
) -> None:
    """The renewer renews it at once; without renewal the waiter attempts again for its ttl."""
    with (
        holdfast.connect(server.url, namespace=namespace) as ours,
        holdfast.connect(server.url, namespace=namespace) as theirs,
    ):
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with theirs.lock("name", ttl=60, renew=renew, timeout=SECONDS) as lease:
                held.set()
                assert done.wait(SECONDS)
                lease.check()

        def left() -> float:
            return max((each.remaining for each in ours.inspect("name").holders), default=0.0)

        worker = threading.Thread(target=hold)
        with ours.lock("name"):
            worker.start()
            wait_until("the waiter", lambda: len(wakeups_of(admin, namespace)) == 1)
        assert held.wait(SECONDS)
        wait_until("the renewal", lambda: left() > 2 * DIRECT_GRANT_SECONDS)
        done.set()
        worker.join()


def test_wake_ups_do_not_show_owners(server: PostgresServer, admin: Admin, namespace: str) -> None:
    """A role that listens learns nothing that could end a hold."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        await ours.take(bench.claim())
        claim = bench.claim()
        await enqueue(theirs, claim)
        assert [key for _, key in wakeups_of(admin, bench.namespace)] == [
            f"{wakeup_key(claim.owner).decode()} {DIRECT_GRANT_SECONDS:.6f}"
        ]
        assert claim.owner not in str(wakeups_of(admin, bench.namespace))

    run_with_bench(server.url, Flavour.BLOCKING, body)
