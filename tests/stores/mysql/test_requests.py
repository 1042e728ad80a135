"""The number of requests of lease rows does not grow with the number of waiters or holds."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import holdfast
from holdfast.claim import Busy, Grant, Mode
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.stores.mysql.protocol import quoted
from servers.mysql import MySQLServer
from servers.proxy import Proxy
from stores.claims import claim_of
from stores.mysql import helpers
from stores.mysql.helpers import (
    account,
    backend_of,
    open_admin,
    rows,
    sessions,
    taken,
    wait_for,
)

server = helpers.server


def test_an_exchange_is_one_request(server: MySQLServer, namespace: str) -> None:
    """A hold ends and another claim of the client gets it, if no other waiter is first."""
    with Proxy(server) as proxy:
        ours, tnext_claims = backend_of(proxy.url, namespace), backend_of(server.url, namespace)
        held, next_claim, other = taken(ours, claim_of()), claim_of(), claim_of()
        for backend, asked in ((ours, next_claim), (tnext_claims, other)):
            assert isinstance(run_now(backend.attempt(asked, join=True)), Busy)
        proxy.reset_counts()
        released, granted = run_now(ours.exchange(held, next_claim))  # type: ignore[attr-defined]
        assert proxy.counts.requests == 1
        assert released
        assert isinstance(granted, Grant)
        assert granted.token > held.token
        last = claim_of()
        assert isinstance(run_now(ours.attempt(last, join=True)), Busy)
        assert isinstance(run_now(ours.exchange(granted, last))[1], Busy)  # type: ignore[attr-defined]
        assert taken(tnext_claims, other).token > granted.token
        for backend in (ours, tnext_claims):
            run_now(backend.close())


def test_an_attempt_waits_for_a_release_of_its_own_client(
    server: MySQLServer, namespace: str
) -> None:
    """Two requests that race for one row cost more than two in sequence."""
    with Proxy(server) as proxy, open_admin(server) as admin:
        url = account(server, admin)
        backend = backend_of(
            proxy.url.replace(server.url.rsplit("@")[0], url.rsplit("@")[0]), namespace
        )
        held = taken(backend, claim_of())
        row = "holdfast_lock WHERE namespace = %s"
        rows(admin, f"BEGIN; SELECT name FROM {row} FOR UPDATE", namespace)
        proxy.reset_counts()
        release = threading.Thread(target=lambda: run_now(backend.release(held)))
        release.start()
        wait_for(lambda: sessions(admin, url, "UPDATE%"))
        tokens: list[int] = []
        attempt = threading.Thread(target=lambda: tokens.append(taken(backend, claim_of()).token))
        attempt.start()
        wait_for(lambda: backend._in_flight._waiting)  # type: ignore[attr-defined]
        assert proxy.counts.requests == 1
        rows(admin, "COMMIT")
        for thread in (release, attempt):
            thread.join(30)
        assert proxy.counts.requests == 2
        assert tokens[0] > held.token
        run_now(backend.close())


def test_many_tasks_of_a_client_use_two_requests_per_hold(
    server: MySQLServer, namespace: str
) -> None:
    """Many tasks acquire and release one after the other: no request is useless."""
    tasks = 60

    async def drain() -> int:
        with Proxy(server) as proxy:
            async with holdfast.connect_async(proxy.url, namespace=namespace) as client:
                lease = await client.lock("name").acquire()
                assert lease is not None
                waiting = [asyncio.create_task(once(client)) for _ in range(tasks)]
                for _ in range(3000):
                    if (await client.inspect("name")).waiters:
                        break
                    await asyncio.sleep(0.01)
                proxy.reset_counts()
                await lease.release()
                await asyncio.gather(*waiting)
                return proxy.counts.requests

    async def once(client: holdfast.AsyncLocks) -> None:
        async with client.lock("name"):
            pass

    assert asyncio.run(drain()) <= 2.5 * tasks


def test_a_batch_is_renewed_by_one_statement(server: MySQLServer, namespace: str) -> None:
    """And the lost holds of it are known by name."""
    with Proxy(server) as proxy, open_admin(server) as admin:
        backend = backend_of(proxy.url, namespace)
        grants = [taken(backend, claim_of(f"name {number}")) for number in range(150)]
        longer = [taken(backend, claim_of(f"other {number}", ttl=60.0)) for number in range(3)]
        proxy.reset_counts()
        assert not run_now(backend.renew(grants + longer, [], until=now() + 5)).lost
        assert proxy.counts.requests == 2
        lost = grants[70].claim
        mine = "holdfast_lock WHERE namespace = %s"
        rows(admin, f"DELETE FROM {mine} AND name = %s", namespace, lost.name)
        rows(
            admin,
            "UPDATE holdfast_lock SET owner = 'another' WHERE namespace = %s AND name = %s",
            namespace,
            grants[71].claim.name,
        )
        renewal = run_now(backend.renew(grants + longer, [], until=now() + 5))
        assert set(renewal.lost) == {lost.owner, grants[71].claim.owner}
        ((seconds, most),) = rows(
            admin,
            "SELECT MIN(ends) DIV 1000000 - UNIX_TIMESTAMP(), MAX(ends) DIV 1000000 - "
            f"UNIX_TIMESTAMP() FROM {mine} AND owner <> 'another'",
            namespace,
        )
        assert seconds > 15
        assert most > 45
        run_now(backend.close())


def test_a_batch_is_locked_in_the_order_of_its_names(
    server: MySQLServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients that renew the same names at once, each in a transaction, do not deadlock. The
    server may return rows in any order."""
    backend: Any = backend_of(server.url, namespace)
    names = [f"{letter}{number}" for number in range(3) for letter in "cab"]
    grants = [taken(backend, claim_of(name, Mode.SHARED)) for name in names]
    read_many, request, sent = backend._read_many, backend.pool.request, list[bytes]()

    async def read_backwards(*asked: Any) -> Any:
        states, damaged = await read_many(*asked)
        return dict(reversed(states.items())), damaged

    async def send(sql: bytes, *more: Any, **others: Any) -> Any:
        sent.append(sql)
        return await request(sql, *more, **others)

    monkeypatch.setattr(backend, "_read_many", read_backwards)
    monkeypatch.setattr(backend.pool, "request", send)
    renewal = run_now(backend.renew(grants, [], until=now() + 60))
    assert not renewal.lost
    assert not renewal.unknown
    (batch,) = [sql for sql in sent if sql.startswith(b"BEGIN")]
    places = [batch.index(quoted(name.encode())) for name in sorted(names)]
    assert places == sorted(places)
    run_now(backend.close())
