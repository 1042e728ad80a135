"""Wake-ups of lease rows while the subscription falls asleep, sleeps or wakes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pytest

from holdfast.claim import Grant
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.stores.mysql import wakeups
from holdfast.stores.mysql.wakeups import SleepSubscription
from holdfast.testing import Flavour
from servers.mysql import MySQLServer
from stores.claims import claim_of
from stores.mysql import helpers
from stores.mysql.helpers import Admin, account, asleep, peers, rows, taken, wait_for

SOON = 30.0

server, admin = helpers.server, helpers.admin


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_wait_on_a_subscription_that_sleeps_for_others(
    server: MySQLServer, admin: Admin, namespace: str, flavour: Flavour
) -> None:
    """Sleeps begin and end between an attempt and its wait. The waiter does not attempt again: it
    rechecks its row, which changes nothing in the store."""
    url = account(server, admin)
    with peers(namespace, flavour, server.url, url) as (theirs, ours):
        held = [theirs.take(name) for name in ("first", "last")]
        first, last = claim_of("first"), claim_of("last")
        waits = [ours.wait(first, ours.enter_queue(first))]
        wait_for(lambda: asleep(admin, url, ["first"]))
        busy, before = ours.enter_queue(last), asleep(admin, url, ["first"])
        wait_for(lambda: asleep(admin, url, ["first"]) > before)
        waits.append(ours.wait(last, busy))
        wait_for(lambda: asleep(admin, url, ["first", "last"]))
        assert not waits[1].done()
        for grant, asked, wait in reversed(list(zip(held, (first, last), waits, strict=True))):
            assert theirs.do(theirs.backend.release(grant))
            wait.result(SOON)
            assert isinstance(ours.do(ours.backend.attempt(asked, join=True)), Grant)


def on_falling_asleep(subscription: SleepSubscription, work: Callable[[], object]) -> None:
    """Runs work once, in the thread that is about to send the sleep request."""
    sleep_request, todo = subscription._sleep_request, [work]

    def request(names: Iterable[str]) -> bytes:
        while todo:
            todo.pop()()
        return sleep_request(names)

    subscription._sleep_request = request


def test_a_wakeup_as_the_subscription_falls_asleep_is_not_lost(
    server: MySQLServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter is called just before the sleep: the kill finds no sleep, and the sleep reads only
    the row of another name."""
    monkeypatch.setattr(wakeups, "SLEEP_SECONDS", 120)
    with peers(namespace, Flavour.BLOCKING, server.url, server.url) as (theirs, ours):
        held = [theirs.take(name) for name in ("first", "last")]
        first, last = claim_of("first"), claim_of("last")
        first_busy = ours.enter_queue(first)
        about_to, go = threading.Event(), threading.Event()

        def pause() -> None:
            about_to.set()
            go.wait(SOON)

        on_falling_asleep(ours.subscription, pause)
        ours.wait(first, first_busy)
        assert about_to.wait(SOON)
        busy = ours.enter_queue(last)
        assert theirs.do(theirs.backend.release(held[1]))
        go.set()
        ours.wait(last, busy).result(SOON)
        taken(ours.backend, last)


def test_a_signal_handler_waits_while_the_subscription_falls_asleep(
    server: MySQLServer, namespace: str
) -> None:
    """It interrupts, for another lock of the same client, the thread that is about to send the
    sleep request. The handler's wait ends in time, and the thread's wait with its wake-up."""
    with peers(namespace, Flavour.BLOCKING, server.url, server.url) as (theirs, ours):
        held = [theirs.take(name) for name in ("first", "last")]
        first, last = claim_of("first"), claim_of("last")
        first_busy, busy = ours.enter_queue(first), ours.enter_queue(last)
        ended = threading.Event()

        def handle() -> None:
            run_now(ours.backend.wait(last, busy, now() + 0.1))
            ended.set()

        on_falling_asleep(ours.subscription, handle)
        wait = ours.wait(first, first_busy)
        assert ended.wait(SOON)
        assert theirs.do(theirs.backend.release(held[0]))
        wait.result(SOON)
        taken(ours.backend, first)


def test_a_subscription_sleeps_where_the_row_is_gone(
    server: MySQLServer, admin: Admin, namespace: str
) -> None:
    """The table was emptied: the next attempt sees that, and until then the subscription sleeps."""
    url = account(server, admin)
    with peers(namespace, Flavour.BLOCKING, server.url, url) as (theirs, ours):
        theirs.take()
        asked = claim_of()
        wait = ours.wait(asked, ours.enter_queue(asked))
        wait_for(lambda: asleep(admin, url, ["name"]))
        rows(admin, "DELETE FROM holdfast_lock WHERE namespace = %s", namespace)
        before = asleep(admin, url, ["name"])
        wait_for(lambda: asleep(admin, url, ["name"]) > before)
        assert not wait.done()
