"""Rows that no version has written: the name is refused as ``Incompatible``, and nothing else is
ever raised; other names, and the list of all, go on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from holdfast import AsyncLocks, Incompatible
from holdfast.io.clock import now
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from servers.postgres import PostgresServer
from stores import sql_helpers
from stores.postgres import bench as postgres_bench
from stores.postgres.bench import Admin, over, stand, subscriptions
from stores.sql_helpers import Clients

server, admin, clients = postgres_bench.server, postgres_bench.admin, sql_helpers.clients

LABEL = '\'["host",1,"thread",""]\''
LEASE = {"owner": "'o'", "mode": "'exclusive'", "weight": "1", "slots": "NULL", "token": "5",
         "since": "now()", "ends": "now() + interval '1 hour'", "label": LABEL}  # fmt: skip
SESSION = {"pid": "1", "mode": "'exclusive'", "weight": "1", "slots": "NULL", "token": "5",
           "since": "now()", "ttl": "30", "label": LABEL}  # fmt: skip


def lease(**fields: str) -> str:
    values = ", ".join({**LEASE, **fields}.values())
    return f"holders = ARRAY[ROW({values})::holdfast.holder]"


HOLDERS = {
    "mode": lease(mode="'x'"),
    "no mode": lease(mode="NULL"),
    "no owner": lease(owner="NULL"),
    "no end": lease(ends="'infinity'"),
    "no token": lease(token="NULL"),
    "token": lease(token="-5"),
    "since": lease(since="'-infinity'"),
    "no weight": lease(weight="NULL"),
    "weight": lease(weight="-9"),
    "two dimensions": f"holders = ARRAY[{lease().removeprefix('holders = ')}]",
}
"""Of which no attempt can tell who holds what."""
SHOWN = {
    "slots": lease(slots="ARRAY[-3]"),
    "slot": lease(slots="ARRAY[NULL, 1]::integer[]"),
    "slots of slots": lease(slots="ARRAY[[1, 2], [3, 4]]"),
    "many slots": lease(slots="ARRAY(SELECT generate_series(0, 70000))"),
    "capacity": "capacity = -4",
}
"""Of which an attempt needs nothing, but that can't be shown."""
UNSEEN = {"no owner", "no weight", "weight", "two dimensions"}
"""Which nobody is shown."""


def damage(admin: Admin, namespace: str, change: str, table: str = "lock") -> None:
    where = "WHERE namespace = %s AND name = 'damaged'"
    text = f"UPDATE holdfast.{table} SET {change} {where}"
    assert admin.execute(text.encode(), (namespace,)).rowcount == 1


@pytest.mark.parametrize("what", [*HOLDERS, *SHOWN])
def test_damaged_holders(
    server: PostgresServer, admin: Admin, clients: Clients, namespace: str, what: str
) -> None:
    """Who holds what can't be told: nobody is let in, and everybody is told."""

    async def body() -> None:
        ours, theirs = clients.open(server.url), clients.open(server.url)
        async with ours.lock("damaged"):
            pass
        async with ours.lock("good") as good:
            damage(admin, namespace, HOLDERS.get(what) or SHOWN[what])
            if what not in UNSEEN:
                with pytest.raises(Incompatible, match="'damaged'"):
                    await theirs.inspect("damaged")
                await _others_go_on(theirs)
            if what in HOLDERS:
                for timeout in (0, 30):
                    with pytest.raises(Incompatible, match="'damaged'"):
                        async with theirs.lock("damaged", timeout=timeout):
                            pass
            await good.extend(40)
            assert good.held

    clients.run(body)


async def _others_go_on(client: AsyncLocks) -> None:
    found = {each.name: each for each in await client.list()}
    assert "can't be read" in found["damaged"].notice
    assert [len(found["good"].holders), found["good"].notice] == [1, ""]


LINES = {
    "token = 9223372036854775807": "release",
    "ring = 'x y'": "release",
    "bell = ''": "release",
    "mode = 'x'": "look",
    "since = 'infinity'": "look",
    "behind = -1": "look",
    "place = 9223372036854775807": "attempt",
}
"""What a waiter has written, or the last token, and who meets it first."""
_WAITER = """
INSERT INTO holdfast.waiter SELECT %s, 'damaged', 1, %s, 'exclusive', 1, now(),
  now() + interval '1 hour', NULL, 0, 'bell', 'ring 5', '["host",1,"thread",""]'"""


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("change", LINES)
def test_a_damaged_line(
    server: PostgresServer, admin: Admin, flavour: Flavour, change: str
) -> None:
    """Each request answers, or says ``Incompatible``; the list of names goes on."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        await ours.take(bench.claim("good"))
        grant = await ours.take(bench.claim("damaged"))
        admin.execute(_WAITER, (bench.namespace, bench.namespace))
        damage(admin, bench.namespace, "crowded = true")
        damage(admin, bench.namespace, change, "lock" if "token" in change else "waiter")
        words: dict[str, Callable[[], Awaitable[object]]] = {
            "look": lambda: theirs.look("damaged"),
            "attempt": lambda: theirs.attempt(bench.claim("damaged")),
            "release": lambda: ours.release(grant),
            "revoke": lambda: theirs.revoke("damaged"),
        }
        assert LINES[change] in [word for word, ask in words.items() if not await _answers(ask)]
        assert "good" in [each.name for each in await theirs.survey()]

    over(server.url, flavour, body)


async def _answers(call: Callable[[], Awaitable[object]]) -> bool:
    try:
        await call()
    except Incompatible as error:
        told = str(error)
    else:
        return True
    assert "'damaged'" in told
    return False


SESSION_OF_ANOTHER_MODE = ", ".join({**SESSION, "mode": "'x'"}.values())


@pytest.mark.parametrize(
    "change",
    [
        f"holders = ARRAY[ROW({SESSION_OF_ANOTHER_MODE})::holdfast.session]",
        "holders[1].since = 'infinity'",
        "holders[1].ttl = 'NaN'",
        "capacity = -4",
    ],
    ids=["mode", "since", "ttl", "capacity"],
)
def test_damaged_counters_of_advisory_mode(
    server: PostgresServer, admin: Admin, clients: Clients, namespace: str, change: str
) -> None:
    """The rows are for people; the locks are the server's own, and go on."""
    url = f"{server.url}?mode=advisory"
    pid = "SELECT (holders[1]).pid, (holders[1]).token FROM holdfast.counter WHERE namespace = %s"

    async def body() -> None:
        ours, theirs = clients.open(url), clients.open(url)
        async with ours.lock("damaged") as lease, ours.lock("good"):
            row = admin.execute(pid + " AND name = 'damaged'", (namespace,)).fetchone()
            damage(admin, namespace, change, "counter")
            assert row is not None
            damage(admin, namespace, f"holders[1].pid = {row[0]}", "counter")
            damage(admin, namespace, f"holders[1].token = {row[1]}", "counter")
            with pytest.raises(Incompatible, match="'damaged'"):
                await theirs.inspect("damaged")
            await _others_go_on(theirs)
            assert lease.held

    clients.run(body)


def test_the_largest_token_of_advisory_mode(
    server: PostgresServer, admin: Admin, clients: Clients, namespace: str
) -> None:
    """There is no higher one."""
    url = f"{server.url}?mode=advisory"

    async def body() -> None:
        ours = clients.open(url)
        async with ours.lock("damaged"):
            pass
        damage(admin, namespace, f"token = {2**63 - 1}", "counter")
        with pytest.raises(Incompatible, match="'damaged'"):
            await ours.lock("damaged").acquire(timeout=30)

    clients.run(body)


@pytest.mark.parametrize("change", ["token = -1", "written = 'infinity'"])
def test_a_damaged_record(
    server: PostgresServer, admin: Admin, clients: Clients, namespace: str, change: str
) -> None:
    async def body() -> None:
        ours = clients.open(server.url)
        await ours.once("job").run(lambda: 1)
        text = f"UPDATE holdfast.record SET {change} WHERE namespace = %s"
        assert admin.execute(text.encode(), (namespace,)).rowcount == 1
        with pytest.raises(Incompatible, match="job"):
            await ours.once("job").run(lambda: 2)

    clients.run(body)


def test_a_damaged_namespace(
    server: PostgresServer, admin: Admin, clients: Clients, namespace: str
) -> None:
    async def body() -> None:
        async with clients.open(server.url).lock("name"):
            pass
        spoil = "UPDATE holdfast.protocol SET mode = 'x y z' WHERE namespace = %s"
        admin.execute(spoil, (namespace,))
        with pytest.raises(Incompatible, match=namespace):
            await clients.open(server.url).lock("name").acquire(timeout=30)

    clients.run(body)


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("token", ["9" * 5000, str(2**63), "١٢٣", "-1", "1_0", ""])
def test_what_anybody_may_notify_is_no_grant(
    server: PostgresServer, admin: Admin, flavour: Flavour, token: str
) -> None:
    """Neither does it end a wait with an error of Python's."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        await ours.take(bench.claim())
        claim = bench.claim()
        busy = await stand(theirs, claim)
        ((subscription, key),) = subscriptions(admin, bench.namespace)
        told = f"{key.partition(' ')[0]} {token}"
        admin.execute("SELECT pg_notify(%s, %s)", (subscription, told))
        assert await theirs.wait(claim, busy, now() + 60) is None

    over(server.url, flavour, body)
