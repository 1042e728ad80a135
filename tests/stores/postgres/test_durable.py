"""What lease rows tell is on disk: kill -9 of a server that flushes by itself only seldom."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import psycopg
import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.io.clock import now
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from servers.postgres import PostgresServer
from stores.postgres.bench import held, over, stand

pytestmark = pytest.mark.faults

SECONDS = 60.0
LAZY = {"synchronous_commit": "off", "wal_writer_delay": "10s"}

blocking_and_asyncio = pytest.mark.parametrize("flavour", list(Flavour))


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with PostgresServer(settings=LAZY) as made:
        yield made


def holders(server: PostgresServer) -> list[tuple[int, str]]:
    """Tokens and owners, as they are found after a crash."""
    server.kill()
    server.start()
    with psycopg.connect(server.url) as connection:
        return connection.execute(
            "SELECT o.token, o.owner FROM holdfast.lock l, unnest(l.holders) o"
        ).fetchall()


@blocking_and_asyncio
def test_a_turn_is_on_disk_before_it_is_told(server: PostgresServer, flavour: Flavour) -> None:
    """What was told with a wake-up is there again."""

    async def body(bench: Bench) -> None:
        giver, grant = await held(bench)
        theirs, claim = bench.peer(), bench.claim()
        busy = await stand(theirs, claim)
        assert await giver.release(grant)
        brought = await theirs.wait(claim, busy, now() + SECONDS)
        assert brought is not None
        assert holders(server) == [(brought.token, claim.owner)]

    over(server.url, flavour, body)


async def _of_a_new_name(bench: Bench) -> Grant:
    return await bench.peer().take(bench.claim())


async def _of_a_free_name(bench: Bench) -> Grant:
    ours = bench.peer()
    assert await ours.release(await ours.take(bench.claim()))
    return await bench.peer().take(bench.claim())


async def _of_one_who_waited(bench: Bench) -> Grant:
    """What it waited for was ended by somebody else, and is reserved for it."""
    ours, theirs = bench.peer(), bench.peer()
    await ours.take(bench.claim())
    claim = bench.claim()
    await stand(theirs, claim)
    assert await ours.revoke("name")
    return await theirs.take(claim)


@blocking_and_asyncio
@pytest.mark.parametrize("take", [_of_a_new_name, _of_a_free_name, _of_one_who_waited])
def test_a_grant_is_on_disk_before_it_is_told(
    server: PostgresServer, flavour: Flavour, take: Callable[[Bench], Awaitable[Grant]]
) -> None:
    """Whatever the role's own ``synchronous_commit`` is."""

    async def body(bench: Bench) -> None:
        grant = await take(bench)
        assert holders(server) == [(grant.token, grant.claim.owner)]

    over(server.url, flavour, body)


async def _last_of_a_line(bench: Bench) -> list[Claim]:
    """One has waited; nobody does any more."""
    giver, grant = await held(bench, waited=True)
    assert await giver.release(grant)
    return []


async def _reader_before_a_writer(bench: Bench) -> list[Claim]:
    """The writer can't come yet, for another reader is still there."""
    ours, theirs = bench.peer(), bench.peer()
    left, stays = [await ours.take(bench.claim(mode=Mode.SHARED)) for _ in range(2)]
    await stand(theirs, bench.claim())
    assert await ours.release(left)
    return [stays.claim]


async def _exchange_in_vain(bench: Bench) -> list[Claim]:
    """Who comes in place of who leaves wants more than that, and has to wait."""
    ours, theirs = bench.peer(), bench.peer()
    left = await ours.take(bench.claim(mode=Mode.SLOTS, limit=2))
    stays = await theirs.take(bench.claim(mode=Mode.SLOTS, limit=2))
    wants_both = bench.claim(mode=Mode.SLOTS, weight=2, limit=2)
    was_ours, told = await ours.exchange(left, wants_both)
    assert was_ours
    assert isinstance(told, Busy)
    return [stays.claim]


@blocking_and_asyncio
@pytest.mark.parametrize("release", [_last_of_a_line, _reader_before_a_writer, _exchange_in_vain])
def test_a_release_that_wakes_nobody_is_on_disk(
    server: PostgresServer, flavour: Flavour, release: Callable[[Bench], Awaitable[list[Claim]]]
) -> None:
    """No grant follows that would bring it along: what has ended does not come back."""

    async def body(bench: Bench) -> None:
        left = await release(bench)
        assert [owner for _, owner in holders(server)] == [claim.owner for claim in left]

    over(server.url, flavour, body)
