"""The session on which a client of MySQL's lease rows is called: whatever happens to it, and to the
one that keeps what it sleeps on, those who wait are called or hear that they have to ask again."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

import pytest

from holdfast.claim import Busy
from holdfast.io.clock import now
from holdfast.stores.mysql.connection import Connection
from holdfast.stores.mysql.sql import still_lock, subscription_lock
from holdfast.stores.mysql.wakeups import Hanger, SleepSubscription
from holdfast.testing import Flavour
from servers.mysql import MySQLServer
from servers.registry import Servers
from stores.claims import claim_of
from stores.mysql import bench as mysql_bench
from stores.mysql.bench import Admin, account, asleep, open_admin, peers, rows, wait_for

SOON = 30.0

server, admin = mysql_bench.server, mysql_bench.admin
both_clients = pytest.mark.parametrize("flavour", list(Flavour))


def who(admin: Admin, subscription: str) -> tuple[int | None, int | None]:
    """The sessions that a subscription has: the one that sleeps, and the renewer of what it sleeps
    on."""
    locks = (lock.decode() for lock in (subscription_lock(subscription), still_lock(subscription)))
    ((sleeps, keeps),) = rows(admin, "SELECT IS_USED_LOCK({}), IS_USED_LOCK({})".format(*locks))
    return sleeps, keeps


def test_a_subscription_may_rest_for_long(servers: Servers, namespace: str) -> None:
    """Nobody ever asks the session anything that keeps what the other one sleeps on. The server
    ends neither of the two as it ends others that are idle."""
    server = servers.of(MySQLServer, arguments=("--wait-timeout=1",))
    with (
        open_admin(server) as admin,
        peers(namespace, Flavour.BLOCKING, server.url, server.url) as (theirs, ours),
    ):
        rows(admin, "SET SESSION wait_timeout = 600")
        theirs.take()
        ours.stand(claim_of())
        sessions = who(admin, ours.listening.subscription)
        assert None not in sessions
        with open_admin(server) as idle:
            number = idle.thread_id()
            shown = "SELECT 1 FROM information_schema.processlist WHERE id = %s"
            assert rows(admin, shown, number)
            wait_for(lambda: not rows(admin, shown, number))
        assert who(admin, ours.listening.subscription) == sessions


@both_clients
def test_a_subscription_without_its_renewer_is_replaced(
    server: MySQLServer, admin: Admin, namespace: str, flavour: Flavour
) -> None:
    """It would sleep by ``SLEEP()`` from then on."""
    with peers(namespace, flavour, server.url, server.url) as (theirs, ours):
        theirs.take()
        asked = claim_of()
        busy, before = ours.stand(asked), ours.listening.subscription
        rows(admin, f"KILL {who(admin, before)[1]}")
        wait_for(lambda: ours.subscription.stalled(now()))
        ours.wait(asked, busy).result(SOON)
        assert ours.listening.subscription != before
        assert None not in who(admin, ours.listening.subscription)


@both_clients
def test_all_who_wait_hear_that_their_subscription_broke(
    server: MySQLServer, admin: Admin, namespace: str, flavour: Flavour
) -> None:
    """Also those who don't read it themselves: nobody else may ever hang another one."""
    url = account(server, admin)
    with peers(namespace, flavour, server.url, url) as (theirs, ours):
        names = ["one", "two", "three"]
        for name in names:
            theirs.take(name)
        waits = [ours.wait(asked, ours.stand(asked)) for asked in map(claim_of, names)]
        wait_for(lambda: asleep(admin, url, names))
        rows(admin, f"KILL {who(admin, ours.listening.subscription)[0]}")
        for wait in waits:
            wait.result(SOON)


@both_clients
def test_a_subscription_that_breaks_as_it_falls_asleep_is_replaced(
    server: MySQLServer, namespace: str, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an event loop does not go on to watch the number of its socket."""
    with peers(namespace, flavour, server.url, server.url) as (theirs, ours):
        theirs.take()
        asked = claim_of()
        busy = ours.stand(asked)
        connection = ours.subscription._connection
        before, number, send = ours.listening.subscription, connection.fileno(), Connection.send

        def send_unless_broken(self: Connection, request: bytes) -> None:
            if self is connection:
                raise self.dropped("it was reset")
            send(self, request)

        monkeypatch.setattr(Connection, "send", send_unless_broken)
        ours.wait(asked, busy).result(SOON)
        if flavour is Flavour.ASYNCIO:
            assert not ours.do(_stop_watching(number))
        ours.wait(asked, ours.stand(asked)).result(SOON)  # hangs another
        assert ours.listening.subscription != before
        assert ours.subscription.open


async def _stop_watching(number: int) -> bool:
    """Whether the loop watched a socket."""
    return asyncio.get_running_loop().remove_reader(number)


@both_clients
def test_a_long_request_is_sent_to_its_end(
    server: MySQLServer,
    admin: Admin,
    namespace: str,
    flavour: Flavour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The names of all who wait may be more than there is room for at once."""
    attach = Hanger.attach

    def hang_with_little_room(self: Hanger, until: float) -> tuple[str, SleepSubscription]:
        made = attach(self, until)
        connection: Any = made[1]._connection
        connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return made

    monkeypatch.setattr(Hanger, "attach", hang_with_little_room)
    url = account(server, admin)
    here = urlsplit(url)._replace(netloc=f"{urlsplit(url).username}:secret@").geturl()
    here += f"?unix_socket={server.folder / 'mysql.sock'}"
    names = [f"{number:02}" + "x" * 500 for number in range(40)]
    with peers(namespace, flavour, server.url, here) as (theirs, ours):
        held = [theirs.take(name) for name in names]
        waits = [ours.wait(asked, ours.stand(asked)) for asked in map(claim_of, names)]
        wait_for(lambda: asleep(admin, url, names))
        assert theirs.do(theirs.backend.release(held[7]))
        waits[7].result(SOON)


@both_clients
def test_a_client_that_closes_leaves_no_subscription_behind(
    server: MySQLServer,
    admin: Admin,
    namespace: str,
    flavour: Flavour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if one is just being hung."""
    made, closed, attach = threading.Event(), threading.Event(), Hanger.attach
    subscriptions: list[str] = []

    def hang_slowly(self: Hanger, until: float) -> tuple[str, SleepSubscription]:
        subscription, sleeping = attach(self, until)
        subscriptions.append(subscription)
        made.set()
        assert closed.wait(SOON)
        return subscription, sleeping

    monkeypatch.setattr(Hanger, "attach", hang_slowly)
    with peers(namespace, flavour, server.url, server.url) as (theirs, ours):
        theirs.take()
        asked = claim_of()
        busy = ours.do(ours.backend.attempt(asked, join=True))
        assert isinstance(busy, Busy)
        wait = ours.wait(asked, busy)
        assert made.wait(SOON)
        assert None not in who(admin, subscriptions[0])
        ours.do(ours.backend.close())
        closed.set()
        wait.result(SOON)
        wait_for(lambda: who(admin, subscriptions[0]) == (None, None))
        assert len(subscriptions) == 1
