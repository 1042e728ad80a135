"""Lease rows are on disk before a reply: kill -9 of a server that rarely flushes by itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import psycopg
import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.io.clock import now
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from servers.postgres import PostgresServer
from stores.postgres.helpers import enqueue, held, run_with_bench

pytestmark = pytest.mark.faults

SECONDS = 60.0
LAZY = {"synchronous_commit": "off", "wal_writer_delay": "10s"}

blocking_and_asyncio = pytest.mark.parametrize("flavour", list(Flavour))


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with PostgresServer(settings=LAZY) as made:
        yield made


def holders(server: PostgresServer) -> list[tuple[int, str]]:
    """Returns tokens and owners after a crash."""
    server.kill()
    server.start()
    with psycopg.connect(server.url) as connection:
        return connection.execute(
            "SELECT o.token, o.owner FROM holdfast.lock l, unnest(l.holders) o"
        ).fetchall()


@blocking_and_asyncio
def test_a_direct_grant_is_on_disk_before_the_wake_up(
    server: PostgresServer, flavour: Flavour
) -> None:
    """The grant of a wake-up is there after a crash."""

    async def body(bench: Bench) -> None:
        giver, grant = await held(bench)
        theirs, claim = bench.peer(), bench.claim()
        busy = await enqueue(theirs, claim)
        assert await giver.release(grant)
        brought = await theirs.wait(claim, busy, now() + SECONDS)
        assert brought is not None
        assert holders(server) == [(brought.token, claim.owner)]

    run_with_bench(server.url, flavour, body)


async def _of_a_new_name(bench: Bench) -> Grant:
    return await bench.peer().take(bench.claim())


async def _of_a_free_name(bench: Bench) -> Grant:
    ours = bench.peer()
    assert await ours.release(await ours.take(bench.claim()))
    return await bench.peer().take(bench.claim())


async def _of_a_waiter(bench: Bench) -> Grant:
    """The hold that it waited for was revoked, and the name is reserved for it."""
    ours, theirs = bench.peer(), bench.peer()
    await ours.take(bench.claim())
    claim = bench.claim()
    await enqueue(theirs, claim)
    assert await ours.revoke("name")
    return await theirs.take(claim)


@blocking_and_asyncio
@pytest.mark.parametrize("take", [_of_a_new_name, _of_a_free_name, _of_a_waiter])
def test_a_grant_is_on_disk_before_it_is_returned(
    server: PostgresServer, flavour: Flavour, take: Callable[[Bench], Awaitable[Grant]]
) -> None:
    """For any ``synchronous_commit`` of the role."""

    async def body(bench: Bench) -> None:
        grant = await take(bench)
        assert holders(server) == [(grant.token, grant.claim.owner)]

    run_with_bench(server.url, flavour, body)


async def _last_of_a_queue(bench: Bench) -> list[Claim]:
    """The holder has waited; there are no waiters left."""
    giver, grant = await held(bench, waited=True)
    assert await giver.release(grant)
    return []


async def _reader_before_a_writer(bench: Bench) -> list[Claim]:
    """The writer is not admitted yet: there is another reader."""
    ours, theirs = bench.peer(), bench.peer()
    left, stays = [await ours.take(bench.claim(mode=Mode.SHARED)) for _ in range(2)]
    await enqueue(theirs, bench.claim())
    assert await ours.release(left)
    return [stays.claim]


async def _exchange_for_a_busy_claim(bench: Bench) -> list[Claim]:
    """The new claim needs more slots than the released one had, and must wait."""
    ours, theirs = bench.peer(), bench.peer()
    left = await ours.take(bench.claim(mode=Mode.SLOTS, limit=2))
    stays = await theirs.take(bench.claim(mode=Mode.SLOTS, limit=2))
    wants_both = bench.claim(mode=Mode.SLOTS, weight=2, limit=2)
    was_ours, result = await ours.exchange(left, wants_both)
    assert was_ours
    assert isinstance(result, Busy)
    return [stays.claim]


@blocking_and_asyncio
@pytest.mark.parametrize(
    "release", [_last_of_a_queue, _reader_before_a_writer, _exchange_for_a_busy_claim]
)
def test_a_release_that_wakes_no_waiter_is_on_disk(
    server: PostgresServer, flavour: Flavour, release: Callable[[Bench], Awaitable[list[Claim]]]
) -> None:
    """No grant follows whose disk write includes it: an ended hold does not come back."""

    async def body(bench: Bench) -> None:
        left = await release(bench)
        assert [owner for _, owner in holders(server)] == [claim.owner for claim in left]

    run_with_bench(server.url, flavour, body)
