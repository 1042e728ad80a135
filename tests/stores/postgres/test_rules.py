"""Rules of lease rows whose absence no ordinary test would notice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from holdfast.claim import Busy, Grant, Mode
from holdfast.io.clock import now
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from holdfast.testing.contract.bench import in_grace
from servers.postgres import PostgresServer
from stores.postgres import helpers
from stores.postgres.helpers import Admin, enqueue, held, run_with_bench, wakeups_of
from stores.sql_helpers import until

SECONDS = 60.0
FUTURE = 2**62
blocking_and_asyncio = pytest.mark.parametrize("flavour", list(Flavour))

server, admin = helpers.server, helpers.admin

_ROW = "SELECT FROM holdfast.lock WHERE namespace = %s AND name = %s FOR UPDATE"
_BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"


@contextmanager
def row_locked(server: PostgresServer, namespace: str, name: str) -> Iterator[Admin]:
    """Another transaction locks the row; it commits at the end of the block."""
    with psycopg.connect(server.url) as other:
        other.execute(_ROW, (namespace, name))
        yield other


async def waited_for(admin: Admin, other: Admin) -> None:
    """Returns once a session waits for a lock of this one."""

    def blocked() -> bool:
        row = admin.execute(_BLOCKED, (other.info.backend_pid,)).fetchone()
        return row is not None and bool(row[0])

    await until(blocked, "no session waits for the row")


@blocking_and_asyncio
def test_only_the_first_waiter_is_admitted(server: PostgresServer, flavour: Flavour) -> None:
    """A free name is reserved for the first waiter: attempts of other waiters stay busy."""

    async def body(bench: Bench) -> None:
        async def admit(name: str) -> None:
            ours, first, second = bench.peer(), bench.peer(), bench.peer()
            grant = await ours.take(bench.claim(name))
            asked, later = bench.claim(name), bench.claim(name)
            await enqueue(first, asked)
            await enqueue(second, later)
            assert await ours.revoke(name) == [grant.token]
            busy = await second.attempt(later)
            assert isinstance(busy, Busy)
            assert busy.place == 1
            assert (await first.take(asked)).token > grant.token

        await in_grace(admit)

    run_with_bench(server.url, flavour, body)


@blocking_and_asyncio
@pytest.mark.parametrize("waited", [True, False], ids=["waited", "alone"])
def test_a_direct_grant_has_a_token_of_the_counter(
    server: PostgresServer, admin: Admin, flavour: Flavour, waited: bool
) -> None:
    """The server's clock may be behind the last token: the token of a direct grant is above it
    all the same."""

    async def body(bench: Bench) -> None:
        async def grant_directly(name: str) -> None:
            giver, grant = await held(bench, name, waited=waited)
            ahead = "UPDATE holdfast.lock SET token = %s WHERE namespace = %s AND name = %s"
            admin.execute(ahead, (FUTURE, bench.namespace, name))
            theirs, claim = bench.peer(), bench.claim(name)
            busy = await enqueue(theirs, claim)
            assert await giver.release(grant)
            assert not wakeups_of(admin, bench.namespace)
            brought = await theirs.wait(claim, busy, now() + SECONDS)
            found = await theirs.take(claim)
            assert found.token == FUTURE + 1
            assert brought is not None
            assert brought.token == found.token

        await in_grace(grant_directly)

    run_with_bench(server.url, flavour, body)


@blocking_and_asyncio
@pytest.mark.parametrize("mode", ["lease", "advisory"])
def test_a_role_with_repeatable_read_reads_what_was_committed(
    server: PostgresServer, admin: Admin, flavour: Flavour, mode: str
) -> None:
    """An attempt that waited for a row sees its newest version. With the role's own isolation the
    server would refuse the request instead (40001)."""
    isolated = "options=-c%20default_transaction_isolation%3Drepeatable%5C%20read"
    table = "lock" if mode == "lease" else "counter"

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        assert await peer.release(await peer.take(bench.claim()))
        with psycopg.connect(server.url) as other:
            touch = f"UPDATE holdfast.{table} SET used = used WHERE namespace = %s"
            other.execute(touch.encode(), (bench.namespace,))
            attempt = asyncio.create_task(peer.attempt(bench.claim()))
            await waited_for(admin, other)
        answer = await attempt
        assert isinstance(answer, Grant)
        assert await peer.release(answer)

    run_with_bench(f"{server.url}?mode={mode}&{isolated}", flavour, body)


@blocking_and_asyncio
def test_renewals_lock_rows_in_the_order_of_their_names(
    server: PostgresServer, admin: Admin, flavour: Flavour
) -> None:
    """A renewal that waits for the first row has locked no other: two renewals of the same rows, in
    different orders, can't wait for each other."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        grants = [await peer.take(bench.claim(name, Mode.SHARED)) for name in ("c", "b", "a")]
        with row_locked(server, bench.namespace, "a") as other:
            renewal = asyncio.create_task(peer.renew(grants))
            await waited_for(admin, other)
            for name in ("b", "c"):
                free = f"{_ROW} SKIP LOCKED"
                assert other.execute(free.encode(), (bench.namespace, name)).fetchone() is not None
        assert not (await renewal).lost

    run_with_bench(server.url, flavour, body)
