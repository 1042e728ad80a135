"""The sleeping session of a client, and the session that holds its lock: whatever happens to them,
waiters are woken or attempt again."""

from __future__ import annotations

import asyncio
import socket
import threading
from urllib.parse import urlsplit

import pytest

from holdfast.claim import Busy
from holdfast.io.clock import now
from holdfast.io.connection import World
from holdfast.stores.mysql.connection import MySqlConnection
from holdfast.stores.mysql.sql import sleep_lock, subscription_lock
from holdfast.stores.mysql.wakeups import SleepSubscription, SubscriptionOpener
from holdfast.testing import Flavour
from servers.mysql import MySQLServer
from servers.registry import Servers
from stores.claims import claim_of
from stores.mysql import helpers
from stores.mysql.helpers import Admin, account, asleep, open_admin, peers, rows, wait_for

SOON = 30.0

server, admin = helpers.server, helpers.admin
both_clients = pytest.mark.parametrize("flavour", list(Flavour))


def sessions_of(admin: Admin, subscription: str) -> tuple[int | None, int | None]:
    """Returns the sessions of a subscription: the sleeping one, and the holder of its lock."""
    locks = (lock.decode() for lock in (subscription_lock(subscription), sleep_lock(subscription)))
    ((sleeping, lock_holder),) = rows(
        admin, "SELECT IS_USED_LOCK({}), IS_USED_LOCK({})".format(*locks)
    )
    return sleeping, lock_holder


def test_an_idle_subscription_is_not_ended(servers: Servers, namespace: str) -> None:
    """No request is ever sent on the session that holds the lock. The server ends neither of the
    two sessions, although it ends others that are idle."""
    server = servers.of(MySQLServer, arguments=("--wait-timeout=1",))
    with (
        open_admin(server) as admin,
        peers(namespace, Flavour.BLOCKING, server.url, server.url) as (theirs, ours),
    ):
        rows(admin, "SET SESSION wait_timeout = 600")
        theirs.take()
        ours.enter_queue(claim_of())
        sessions = sessions_of(admin, ours.wakeups.subscription)
        assert None not in sessions
        with open_admin(server) as idle:
            number = idle.thread_id()
            shown = "SELECT 1 FROM information_schema.processlist WHERE id = %s"
            assert rows(admin, shown, number)
            wait_for(lambda: not rows(admin, shown, number))
        assert sessions_of(admin, ours.wakeups.subscription) == sessions


@both_clients
def test_a_subscription_without_its_lock_holder_is_replaced(
    server: MySQLServer, admin: Admin, namespace: str, flavour: Flavour
) -> None:
    """Otherwise it would use ``SLEEP()`` from then on."""
    with peers(namespace, flavour, server.url, server.url) as (theirs, ours):
        theirs.take()
        asked = claim_of()
        busy, before = ours.enter_queue(asked), ours.wakeups.subscription
        rows(admin, f"KILL {sessions_of(admin, before)[1]}")
        wait_for(lambda: ours.subscription.stalled(now()))
        ours.wait(asked, busy).result(SOON)
        assert ours.wakeups.subscription != before
        assert None not in sessions_of(admin, ours.wakeups.subscription)


@both_clients
def test_all_waiters_are_woken_when_the_subscription_breaks(
    server: MySQLServer, admin: Admin, namespace: str, flavour: Flavour
) -> None:
    """Also those that do not read it: there may be no other waiter to open a new one."""
    url = account(server, admin)
    with peers(namespace, flavour, server.url, url) as (theirs, ours):
        names = ["one", "two", "three"]
        for name in names:
            theirs.take(name)
        waits = [ours.wait(asked, ours.enter_queue(asked)) for asked in map(claim_of, names)]
        wait_for(lambda: asleep(admin, url, names))
        rows(admin, f"KILL {sessions_of(admin, ours.wakeups.subscription)[0]}")
        for wait in waits:
            wait.result(SOON)


@both_clients
def test_a_subscription_that_breaks_as_it_falls_asleep_is_replaced(
    server: MySQLServer, namespace: str, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an event loop does not keep watching its file descriptor."""
    with peers(namespace, flavour, server.url, server.url) as (theirs, ours):
        theirs.take()
        asked = claim_of()
        busy = ours.enter_queue(asked)
        connection = ours.subscription.connection
        before, number, send = ours.wakeups.subscription, connection.fileno(), MySqlConnection.send

        def send_unless_broken(self: MySqlConnection, request: bytes) -> None:
            if self is connection:
                raise self.dropped("it was reset")
            send(self, request)

        monkeypatch.setattr(MySqlConnection, "send", send_unless_broken)
        ours.wait(asked, busy).result(SOON)
        if flavour is Flavour.ASYNCIO:
            assert not ours.do(_stop_watching(number))
        ours.wait(asked, ours.enter_queue(asked)).result(SOON)  # opens a new one
        assert ours.wakeups.subscription != before
        assert ours.subscription.connection.open


async def _stop_watching(number: int) -> bool:
    """Removes the reader of a file descriptor. Returns whether there was one."""
    return asyncio.get_running_loop().remove_reader(number)


@both_clients
def test_a_long_request_is_sent_to_its_end(
    server: MySQLServer,
    admin: Admin,
    namespace: str,
    flavour: Flavour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The names of all waiters may not fit into the socket's buffer."""
    open_ = SubscriptionOpener.open

    async def open_with_small_buffer(
        self: SubscriptionOpener, world: World, until: float
    ) -> SleepSubscription:
        made = await open_(self, world, until)
        made.connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return made

    monkeypatch.setattr(SubscriptionOpener, "open", open_with_small_buffer)
    url = account(server, admin)
    here = urlsplit(url)._replace(netloc=f"{urlsplit(url).username}:secret@").geturl()
    here += f"?unix_socket={server.folder / 'mysql.sock'}"
    names = [f"{number:02}" + "x" * 500 for number in range(40)]
    with peers(namespace, flavour, server.url, here) as (theirs, ours):
        held = [theirs.take(name) for name in names]
        waits = [ours.wait(asked, ours.enter_queue(asked)) for asked in map(claim_of, names)]
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
    """Also if one is being opened."""
    made, closed, open_ = threading.Event(), threading.Event(), SubscriptionOpener.open
    subscriptions: list[str] = []

    async def open_slowly(
        self: SubscriptionOpener, world: World, until: float
    ) -> SleepSubscription:
        sleeping = await open_(self, world, until)
        subscriptions.append(sleeping.identity)
        made.set()
        await world.run(lambda: closed.wait(SOON), lambda _: None)
        return sleeping

    monkeypatch.setattr(SubscriptionOpener, "open", open_slowly)
    with peers(namespace, flavour, server.url, server.url) as (theirs, ours):
        theirs.take()
        asked = claim_of()
        busy = ours.do(ours.backend.attempt(asked, join=True))
        assert isinstance(busy, Busy)
        wait = ours.wait(asked, busy)
        assert made.wait(SOON)
        assert None not in sessions_of(admin, subscriptions[0])
        ours.do(ours.backend.close())
        closed.set()
        wait.result(SOON)
        wait_for(lambda: sessions_of(admin, subscriptions[0]) == (None, None))
        assert len(subscriptions) == 1
