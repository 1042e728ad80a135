"""Calls to those who wait for MySQL's lease rows, as the subscription falls asleep, sleeps and
wakes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pytest

from holdfast.claim import Grant
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.stores.mysql import wakeups as mysql_listen
from holdfast.stores.mysql.wakeups import SleepSubscription
from holdfast.testing import Flavour
from servers.mysql import MySQLServer
from stores.claims import claim_of
from stores.mysql import bench as mysql_bench
from stores.mysql.bench import Admin, account, asleep, peers, rows, taken, wait_for

SOON = 30.0

server, admin = mysql_bench.server, mysql_bench.admin


@pytest.mark.parametrize("flavour", list(Flavour))
def test_who_comes_to_a_subscription_that_sleeps_waits(
    server: MySQLServer, admin: Admin, namespace: str, flavour: Flavour
) -> None:
    """Sleeps begin and end while somebody is told to wait and does. That is no reason to ask again:
    it looks whether it was called, which changes nothing in the store."""
    url = account(server, admin)
    with peers(namespace, flavour, server.url, url) as (theirs, ours):
        held = [theirs.take(name) for name in ("first", "last")]
        first, last = claim_of("first"), claim_of("last")
        waits = [ours.wait(first, ours.stand(first))]
        wait_for(lambda: asleep(admin, url, ["first"]))
        busy, before = ours.stand(last), asleep(admin, url, ["first"])
        wait_for(lambda: asleep(admin, url, ["first"]) > before)
        waits.append(ours.wait(last, busy))
        wait_for(lambda: asleep(admin, url, ["first", "last"]))
        assert not waits[1].done()
        for grant, asked, wait in reversed(list(zip(held, (first, last), waits, strict=True))):
            assert theirs.do(theirs.backend.release(grant))
            wait.result(SOON)
            assert isinstance(ours.do(ours.backend.attempt(asked, join=True)), Grant)


def on_falling_asleep(subscription: SleepSubscription, work: Callable[[], object]) -> None:
    """Has work done, once, by the thread that is about to send what the subscription sleeps by."""
    listen, todo = subscription._listen, [work]

    def request(names: Iterable[str]) -> bytes:
        while todo:
            todo.pop()()
        return listen.request(names)

    subscription._listen = listen._replace(request=request)


def test_a_call_as_the_subscription_falls_asleep_is_not_lost(
    server: MySQLServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody is told to wait, and called, just before: the kill finds no sleep, and the look with
    which that one begins is for another name."""
    monkeypatch.setattr(mysql_listen, "SLEEP_SECONDS", 120)
    with peers(namespace, Flavour.BLOCKING, server.url, server.url) as (theirs, ours):
        held = [theirs.take(name) for name in ("first", "last")]
        first, last = claim_of("first"), claim_of("last")
        first_busy = ours.stand(first)
        about_to, go = threading.Event(), threading.Event()

        def pause() -> None:
            about_to.set()
            go.wait(SOON)

        on_falling_asleep(ours.subscription, pause)
        ours.wait(first, first_busy)
        assert about_to.wait(SOON)
        busy = ours.stand(last)
        assert theirs.do(theirs.backend.release(held[1]))
        go.set()
        ours.wait(last, busy).result(SOON)
        taken(ours.backend, last)


def test_a_signal_handler_waits_while_the_subscription_falls_asleep(
    server: MySQLServer, namespace: str
) -> None:
    """It interrupts, for another lock of the same client, the very thread that would go on to send
    what the subscription sleeps by. Its wait ends in time, and then that of the thread with a
    call."""
    with peers(namespace, Flavour.BLOCKING, server.url, server.url) as (theirs, ours):
        held = [theirs.take(name) for name in ("first", "last")]
        first, last = claim_of("first"), claim_of("last")
        first_busy, busy = ours.stand(first), ours.stand(last)
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
    """Somebody has emptied the table: that is seen by the next attempt, not asked again and again
    until then."""
    url = account(server, admin)
    with peers(namespace, Flavour.BLOCKING, server.url, url) as (theirs, ours):
        theirs.take()
        asked = claim_of()
        wait = ours.wait(asked, ours.stand(asked))
        wait_for(lambda: asleep(admin, url, ["name"]))
        rows(admin, "DELETE FROM holdfast_lock WHERE namespace = %s", namespace)
        before = asleep(admin, url, ["name"])
        wait_for(lambda: asleep(admin, url, ["name"]) > before)
        assert not wait.done()
