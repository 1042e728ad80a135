"""Slots as named locks of MySQL: waiting for them, releasing and breaking them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import holdfast
from holdfast.claim import Claim, Mode
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores.mysql_advisory.sql import MySqlAdvisoryStatements
from servers.mysql import MySQLServer
from stores.claims import claim_of
from stores.mysql import helpers
from stores.mysql.helpers import Admin, backend_of, key, one, taken, wait_for

server, admin = helpers.server, helpers.admin


@pytest.fixture
def url(server: MySQLServer) -> str:
    return f"{server.url}?mode=advisory"


def test_a_freed_slot_is_passed_on_at_once(url: str, admin: Admin, namespace: str) -> None:
    """The first waiter is woken by each release, a hundred times in a row."""
    began = now()
    with holdfast.connect(url, namespace=namespace) as ours:
        tokens: list[int] = []

        def work() -> None:
            with holdfast.connect(url, namespace=namespace) as locks:
                for _ in range(25):
                    with locks.semaphore("name", 2, timeout=60) as lease:
                        tokens.append(lease.token)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(tokens)) == 100
        assert now() - began < 30  # a wait that is not killed takes a second
        info = ours.inspect("name")
        assert (info.holders, info.waiters) == ((), ())
    assert one(admin, f"SELECT IS_FREE_LOCK('{key(namespace, part=':t')}')") == 1


def test_breaking_a_hold_does_not_end_the_waiter(url: str, admin: Admin, namespace: str) -> None:
    """The first waiter takes the slots while they become free one after the other: its session is
    not mistaken for the broken holder's."""
    slots = 16
    with (
        holdfast.connect(url, namespace=namespace) as ours,
        holdfast.connect(url, namespace=namespace) as theirs,
        holdfast.connect(url, namespace=namespace) as looking,
    ):
        held = ours.semaphore("name", slots, permits=slots).acquire()
        assert held is not None
        lost = threading.Event()
        held.on_lost(lambda _: lost.set())
        wanted = theirs.semaphore("name", slots, permits=slots, timeout=60)
        took: list[holdfast.Lease | None] = []
        thread = threading.Thread(target=lambda: took.append(wanted.acquire()))
        thread.start()
        wait_for(lambda: one(admin, f"SELECT IS_USED_LOCK('{key(namespace, part=':n')}')"))
        session = one(admin, f"SELECT IS_USED_LOCK('{key(namespace, part=':t')}')")
        assert session is not None
        assert looking.break_lock("name", reason="a test") == held.token
        thread.join(60)
        assert one(admin, f"SELECT IS_USED_LOCK('{key(namespace, part=':0')}')") == session
        assert took[0] is not None
        assert took[0].token > held.token
        assert lost.wait(60)
        took[0].release()


def test_a_killed_wait_keeps_no_lock(
    url: str, admin: Admin, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may stop in the middle of a killed statement, as MySQL does. The next request then
    releases the lock by which the wait is found: otherwise a holder would be killed."""
    await_slot = MySqlAdvisoryStatements.await_slot

    def wait_without_its_end(self: MySqlAdvisoryStatements, claim: Claim) -> bytes:
        return await_slot(self, claim).rpartition(b", RELEASE_LOCK")[0]

    monkeypatch.setattr(MySqlAdvisoryStatements, "await_slot", wait_without_its_end)
    waiting = f"SELECT IS_USED_LOCK('{key(namespace, part=':n')}')"
    with holdfast.connect(url, namespace=namespace) as locks:
        held = locks.semaphore("name", 1).acquire()
        assert held is not None
        took: list[holdfast.Lease | None] = []
        thread = threading.Thread(
            target=lambda: took.append(locks.semaphore("name", 1).acquire(timeout=60))
        )
        thread.start()
        wait_for(lambda: one(admin, waiting))
        held.release()
        thread.join(60)
        assert took[0] is not None
        assert one(admin, waiting) is None
        took[0].release()


def test_a_session_is_idle_only_when_all_is_undone(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next waiter can't be woken: nobody else may have got the session by then, as the failure
    drops it."""
    backend: Any = backend_of(url, namespace)
    asked = claim_of(mode=Mode.SLOTS, limit=2)
    taken(backend, asked)
    request, seen = backend.pool.request, []

    async def request_unless_wake_up(sql: bytes, *rest: Any, **how: Any) -> Any:
        if sql == backend.statements.wake_slot_waiter("name"):
            seen.append(list(backend.sessions.idle))
            raise BackendUnavailable("no answer in time")
        return await request(sql, *rest, **how)

    monkeypatch.setattr(backend.pool, "request", request_unless_wake_up)
    run_now(backend.abandon(asked))
    assert seen == [[]]
    assert backend.sessions.idle == []
    run_now(backend.close())
