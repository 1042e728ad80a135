"""Rows that no version of Holdfast writes: a request for the name raises ``Incompatible``, and no
other error. Other names, and the list of all names, still work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from holdfast import AsyncLocks, Incompatible
from holdfast.io.clock import now
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from servers.postgres import PostgresServer
from stores import sql_helpers
from stores.postgres import helpers
from stores.postgres.helpers import Admin, enqueue, run_with_bench, wakeups_of
from stores.sql_helpers import Clients

server, admin, clients = helpers.server, helpers.admin, sql_helpers.clients

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
"""Damage that hides the holders from an attempt."""
SHOWN = {
    "slots": lease(slots="ARRAY[-3]"),
    "slot": lease(slots="ARRAY[NULL, 1]::integer[]"),
    "slots of slots": lease(slots="ARRAY[[1, 2], [3, 4]]"),
    "many slots": lease(slots="ARRAY(SELECT generate_series(0, 70000))"),
    "capacity": "capacity = -4",
}
"""Damage that an attempt does not need, but that can't be shown."""
UNSEEN = {"no owner", "no weight", "weight", "two dimensions"}
"""Damage in values that are not shown."""


def damage(admin: Admin, namespace: str, change: str, table: str = "lock") -> None:
    where = "WHERE namespace = %s AND name = 'damaged'"
    text = f"UPDATE holdfast.{table} SET {change} {where}"
    assert admin.execute(text.encode(), (namespace,)).rowcount == 1


@pytest.mark.parametrize("what", [*HOLDERS, *SHOWN])
def test_damaged_holders(
    server: PostgresServer,
    admin: Admin,
    clients: Clients,
    namespace: str,
    what: str,
) -> None:
    """The holders are unknown: no claim is admitted, and every client gets an error."""

    async def body() -> None:
        ours, theirs = clients.open(server.url), clients.open(server.url)
        async with ours.lock("damaged"):
            pass
        async with ours.lock("good") as good:
            damage(admin, namespace, HOLDERS.get(what) or SHOWN[what])
            if what not in UNSEEN:
                with pytest.raises(Incompatible, match="'damaged'"):
                    await theirs.inspect("damaged")
                await _other_names_work(theirs)
            if what in HOLDERS:
                for timeout in (0, 30):
                    with pytest.raises(Incompatible, match="'damaged'"):
                        async with theirs.lock("damaged", timeout=timeout):
                            pass
            await good.extend(40)
            assert good.held

    clients.run(body)


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("what", HOLDERS)
def test_a_waiter_learns_of_damaged_holders_at_once(
    server: PostgresServer, admin: Admin, flavour: Flavour, what: str
) -> None:
    """At its first attempt: it does not queue behind holders that it can't read."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        await peer.take(bench.claim("damaged"))
        damage(admin, bench.namespace, HOLDERS[what])
        with pytest.raises(Incompatible, match="'damaged'"):
            await peer.attempt(bench.claim("damaged"))

    run_with_bench(server.url, flavour, body)


async def _other_names_work(client: AsyncLocks) -> None:
    found = {each.name: each for each in await client.list()}
    assert "can't be read" in found["damaged"].notice
    assert [len(found["good"].holders), found["good"].notice] == [1, ""]


ENTRIES = {
    "token = 9223372036854775807": "release",
    "ring = 'x y'": "release",
    "bell = ''": "release",
    "mode = 'x'": "look",
    "since = 'infinity'": "look",
    "behind = -1": "look",
    "place = 9223372036854775807": "attempt",
}
"""Damage to a waiter's entry or to the last token, and the first request that fails."""
_WAITER = """
INSERT INTO holdfast.waiter SELECT %s, 'damaged', 1, %s, 'exclusive', 1, now(),
  now() + interval '1 hour', NULL, 0, 'bell', 'ring 5', '["host",1,"thread",""]'"""


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("change", ENTRIES)
def test_a_damaged_queue_entry(
    server: PostgresServer, admin: Admin, flavour: Flavour, change: str
) -> None:
    """Each request succeeds or raises ``Incompatible``; the list of names still works."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        await ours.take(bench.claim("good"))
        grant = await ours.take(bench.claim("damaged"))
        admin.execute(_WAITER, (bench.namespace, bench.namespace))
        damage(admin, bench.namespace, "crowded = true")
        damage(admin, bench.namespace, change, "lock" if "token" in change else "waiter")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "look": lambda: theirs.look("damaged"),
            "attempt": lambda: theirs.attempt(bench.claim("damaged")),
            "release": lambda: ours.release(grant),
            "revoke": lambda: theirs.revoke("damaged"),
        }
        assert ENTRIES[change] in [
            word for word, call in calls.items() if not await _succeeds(call)
        ]
        assert "good" in [each.name for each in await theirs.survey()]

    run_with_bench(server.url, flavour, body)


async def _succeeds(call: Callable[[], Awaitable[object]]) -> bool:
    try:
        await call()
    except Incompatible as error:
        message = str(error)
    else:
        return True
    assert "'damaged'" in message
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
    """The rows are for people; the locks are the server's own, and still work."""
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
            await _other_names_work(theirs)
            assert lease.held

    clients.run(body)


def test_the_largest_token_of_advisory_mode(
    server: PostgresServer, admin: Admin, clients: Clients, namespace: str
) -> None:
    """There is no higher token to grant."""
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
def test_a_notification_with_any_text_is_no_grant(
    server: PostgresServer, admin: Admin, flavour: Flavour, token: str
) -> None:
    """Nor does it end a wait with an exception."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        await ours.take(bench.claim())
        claim = bench.claim()
        busy = await enqueue(theirs, claim)
        ((channel, key),) = wakeups_of(admin, bench.namespace)
        payload = f"{key.partition(' ')[0]} {token}"
        admin.execute("SELECT pg_notify(%s, %s)", (channel, payload))
        assert await theirs.wait(claim, busy, now() + 60) is None

    run_with_bench(server.url, flavour, body)
