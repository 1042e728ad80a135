"""The queue of lease rows: releasing to the next waiter, order, and wake-ups."""

from __future__ import annotations

import threading
from functools import partial

import pytest

import holdfast
from holdfast.claim import Busy, Claim, Mode, write_label
from holdfast.cli.show import main as show
from holdfast.core.contract import Backend
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.stores.mysql import wakeups
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


def enter_queue(backend: Backend, asked: Claim) -> Busy:
    """Joins the queue, with a subscription."""
    busy = Busy(0)
    for _ in range(2):  # the second attempt stores the subscription that the first wait opens
        answer = run_now(backend.attempt(asked, join=True))
        assert isinstance(answer, Busy)
        busy = answer
        run_now(backend.wait(asked, busy, 0.0 if busy.ref else now() + 60))
    return busy


def test_a_change_of_the_holder_is_two_requests(server: MySQLServer, namespace: str) -> None:
    """Releasing to the first waiter, taking as that waiter and joining are one request each."""
    with Proxy(server) as proxy:
        ours, theirs = backend_of(proxy.url, namespace), backend_of(server.url, namespace)
        warm, first, second = claim_of(), claim_of(), claim_of()
        held = taken(theirs, claim_of())
        enter_queue(ours, warm)
        assert run_now(theirs.release(held))
        held = taken(ours, warm)
        enter_queue(theirs, first)
        proxy.reset_counts()
        assert run_now(ours.release(held))
        assert isinstance(run_now(ours.attempt(second, join=True)), Busy)
        assert run_now(theirs.release(taken(theirs, first)))
        last = taken(ours, second)
        assert (proxy.counts.connections, proxy.counts.requests) == (0, 3)
        assert last.token > held.token
        for backend in (ours, theirs):
            run_now(backend.close())


def test_a_subscription_is_stored_in_one_request(server: MySQLServer, namespace: str) -> None:
    """A waiter changes its own entry of the row only, so that many new clients do not race. The
    rest of the entry, and the other entries, stay as they are."""
    with Proxy(server) as proxy:
        holder = backend_of(server.url, namespace)
        held = taken(holder, claim_of())
        waiters = [backend_of(proxy.url, namespace) for _ in range(3)]
        notes = [f"{number} - r1\n exclusive 0 '" for number in range(3)]
        asked = [claim_of()._replace(label=write_label("host", 1, "a b", note)) for note in notes]
        first = [run_now(b.attempt(c, join=True)) for b, c in zip(waiters, asked, strict=True)]
        before = run_now(holder.look("name")).waiters
        for backend, wanted, busy in zip(waiters, asked, first, strict=True):
            assert isinstance(busy, Busy)
            assert busy.ref == ""
            run_now(backend.wait(wanted, busy, now() + 60))  # opens the subscription
        for place in (1, 0, 2):
            proxy.reset_counts()
            busy = run_now(waiters[place].attempt(asked[place], join=True))
            assert proxy.counts.requests == 1
            assert isinstance(busy, Busy)
            assert (busy.place, busy.ref) == (place, waiters[place].wakeups.subscription)  # type: ignore[attr-defined]
            assert 0 < (busy.retry_seconds or 0) <= 30
        assert run_now(holder.look("name")).waiters == before
        assert [waiter.note for waiter in before] == notes
        with open_admin(server) as admin:
            row = "holdfast_lock WHERE namespace = %s"
            ((crowd,),) = rows(admin, f"SELECT crowd FROM {row}", namespace)
        stored = [line.split(" ")[4:6] for line in crowd.decode().splitlines()]
        assert stored == [[b.wakeups.subscription, "-"] for b in waiters]  # type: ignore[attr-defined]
        assert run_now(holder.release(held))
        for backend, wanted in zip(waiters, asked, strict=True):
            grant = taken(backend, wanted)
            assert run_now(backend.release(grant))
            run_now(backend.close())
        run_now(holder.close())


@pytest.mark.parametrize("another", [True, False])
def test_waiters_that_can_not_be_woken_are_reported(
    server: MySQLServer, namespace: str, capsys: pytest.CaptureFixture[str], another: bool
) -> None:
    """An account may not kill the sleep of another account: ``inspect`` reports it, and the waiter
    polls. Between sessions of one account there is nothing to report."""
    with open_admin(server) as admin:
        ours = account(server, admin)
        url = account(server, admin) if another else ours
        holder = holdfast.connect(ours, namespace=namespace)
        waiter = holdfast.connect(url, namespace=namespace)
        lease = holder.lock("name").acquire()
        assert lease is not None
        assert holder.inspect("name").notice == ""
        tokens: list[int] = []
        thread = threading.Thread(target=lambda: tokens.append(_token(waiter)))
        thread.start()
        wait_for(lambda: sessions(admin, url, "SELECT name, IF(LOCATE%"))
    notice = holder.inspect("name").notice
    assert ("some waiters use another account" in notice) == another
    assert show(["name", "--url", ours, "--namespace", namespace]) == 0
    assert ("notice: waiters are not woken: " in capsys.readouterr().out) == another
    assert lease.release()
    thread.join(30)
    assert tokens[0] > lease.token
    for client in (holder, waiter):
        client.close()


def _token(client: holdfast.Locks) -> int:
    with client.lock("name", timeout=60) as lease:
        return lease.token


@pytest.mark.parametrize("others", [0, 1])
def test_a_wakeup_before_the_wait_is_not_lost(
    server: MySQLServer, namespace: str, others: int
) -> None:
    """The wake-up may arrive between the attempt and the wait; also while another waiter of the
    client uses the same subscription."""
    holder, waiter = backend_of(server.url, namespace), backend_of(server.url, namespace)
    aside, asked = claim_of("aside"), claim_of()
    kept = taken(holder, claim_of("aside"))
    held = taken(holder, claim_of())
    busy = enter_queue(waiter, aside)
    threads = [
        threading.Thread(target=lambda: run_now(waiter.wait(aside, busy, now() + 60)))
        for _ in range(others)
    ]
    for thread in threads:
        thread.start()
    busy_too = enter_queue(waiter, asked)
    assert run_now(holder.release(held))
    called = threading.Thread(target=lambda: run_now(waiter.wait(asked, busy_too, now() + 60)))
    called.start()
    called.join(30)
    assert not called.is_alive()
    assert taken(waiter, asked).token > held.token
    assert run_now(holder.release(kept))
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for backend in (holder, waiter):
        run_now(backend.close())


def test_an_exchange_stores_the_current_subscription(server: MySQLServer, namespace: str) -> None:
    """A waiter opens its subscription while another thread of its client exchanges on its behalf,
    and must try again. The row must keep the new subscription, by which the waiter is woken."""
    with open_admin(server) as admin:
        url = account(server, admin)
        ours, theirs = backend_of(url, namespace), backend_of(server.url, namespace)
        held, next_claim = taken(ours, claim_of()), claim_of()
        enter_queue(theirs, claim_of())
        busy = run_now(ours.attempt(next_claim, join=True))
        assert isinstance(busy, Busy)
        row = "holdfast_lock WHERE namespace = %s"
        rows(admin, f"BEGIN; SELECT name FROM {row} FOR UPDATE", namespace)
        exchange = threading.Thread(target=lambda: run_now(ours.exchange(held, next_claim)))  # type: ignore[attr-defined]
        exchange.start()
        wait_for(lambda: sessions(admin, url, "UPDATE%"))
        run_now(ours.wait(next_claim, busy, now() + 60))
        rows(
            admin, "UPDATE holdfast_lock SET version = version + 1 WHERE namespace = %s", namespace
        )
        rows(admin, "COMMIT")
        exchange.join(30)
        ((crowd,),) = rows(admin, f"SELECT crowd FROM {row}", namespace)
    subscription = ours.wakeups.subscription  # type: ignore[attr-defined]
    assert subscription
    assert subscription in crowd.decode()
    for backend in (ours, theirs):
        run_now(backend.close())


def test_exclusive_and_shared_claims_are_granted_in_order(
    server: MySQLServer, namespace: str
) -> None:
    """Exclusive claims use single requests, readers the compare-and-swap: they share one queue."""
    first, second = backend_of(server.url, namespace), backend_of(server.url, namespace)
    held = taken(first, claim_of())
    writer, last = claim_of(), claim_of()
    readers = [claim_of(mode=Mode.SHARED) for _ in range(2)]
    for backend, asked in zip((first, second) * 2, (writer, *readers, last), strict=True):
        enter_queue(backend, asked)
    assert [waiter.mode for waiter in run_now(first.look("name")).waiters] == [
        Mode.EXCLUSIVE, Mode.SHARED, Mode.SHARED, Mode.EXCLUSIVE,
    ]  # fmt: skip
    for asked in (*readers, last, claim_of()):
        assert isinstance(run_now(first.attempt(asked, join=False)), Busy)
    assert run_now(first.release(held))
    assert isinstance(run_now(second.attempt(last, join=True)), Busy)
    alone = taken(first, writer)
    assert isinstance(run_now(second.attempt(readers[0], join=True)), Busy)
    assert run_now(first.release(alone))
    together = [taken(second, reader) for reader in readers]
    assert isinstance(run_now(second.attempt(last, join=True)), Busy)
    for grant in together:
        assert run_now(second.release(grant))
    tokens = [alone.token, *(grant.token for grant in together), taken(second, last).token]
    assert tokens == sorted(set(tokens))
    assert run_now(first.look("name")).waiters == ()
    for backend in (first, second):
        run_now(backend.close())


def test_a_wakeup_to_an_idle_subscription_is_not_lost(
    server: MySQLServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the wait begins, the subscription already sleeps for another name, and has not read this
    one."""
    monkeypatch.setattr(wakeups, "SLEEP_SECONDS", 120)
    admin = open_admin(server)
    url = account(server, admin)
    ours, theirs = backend_of(url, namespace), backend_of(server.url, namespace)
    one, other = claim_of("one"), claim_of("other")
    held = [taken(theirs, claim_of(name)) for name in ("one", "other")]
    first_busy = run_now(ours.attempt(one, join=True))
    assert isinstance(first_busy, Busy)
    run_now(ours.wait(one, first_busy, now() + 60))  # opens the subscription, and returns
    one_busy, busy = (run_now(ours.attempt(claim, join=True)) for claim in (one, other))
    assert isinstance(one_busy, Busy)
    assert isinstance(busy, Busy)
    assert run_now(theirs.release(held[1]))
    until = now() + 120

    def wait(claim: Claim, busy: Busy) -> threading.Thread:
        work = partial(run_now, ours.wait(claim, busy, until))
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    first = wait(one, one_busy)
    wait_for(lambda: sessions(admin, url, "%GET_LOCK%"))
    second = wait(other, busy)
    second.join(60)
    assert not second.is_alive()
    taken(ours, other)
    assert run_now(theirs.release(held[0]))
    first.join(60)
    assert not first.is_alive()
    taken(ours, one)
    admin.close()
    for backend in (ours, theirs):
        run_now(backend.close())
