"""A ZooKeeper session outlives its connections, and depends on no single thread or event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import holdfast
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.blocking import WORLD, wait_for
from holdfast.io.clock import now
from holdfast.io.connection import READ
from holdfast.stores.zookeeper.client import connection as client_connection
from holdfast.stores.zookeeper.client import greeting
from holdfast.stores.zookeeper.client.greeting import Greeting
from holdfast.stores.zookeeper.client.heartbeats import Turn, heartbeats
from holdfast.stores.zookeeper.client.packets import Check, Checks, Multi, NoNode
from holdfast.stores.zookeeper.session import STUCK_SECONDS, Opening
from servers.process import wait_until
from servers.proxy import Proxy
from stores.zookeeper import helpers
from stores.zookeeper.helpers import TTL, QuickServer, hold, session_of

SOON = 60.0
FEW_SECONDS = 5.0
server, locks, others = helpers.server, helpers.locks, helpers.others


def test_a_session_continues_over_another_connection(locks: holdfast.Locks) -> None:
    """With its id, so that its holds stay."""
    held = locks.lock("held").acquire()
    assert held
    session = session_of(locks, TTL)
    number, before = session.id, session.connection
    session.disconnect()
    assert hold(locks, "name") > 0
    assert session.id == number
    assert session.connection is not before
    assert held.release() is True


def test_a_connection_that_the_server_closed_is_not_used(
    server: QuickServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread reads while nothing is due; a request would have an unknown outcome."""
    monkeypatch.setattr(client_connection, "UNUSED_SECONDS", 0.0)
    with Proxy(server) as proxy, holdfast.connect(proxy.url, ttl=TTL) as locks:
        session = session_of(locks, TTL)
        lease = locks.lock("name").acquire()
        before = session.connection
        assert lease
        assert before is not None
        proxy.cut()
        assert before.over or wait_for({before.fd: READ}, now() + SOON)
        assert lease.release() is True
        assert session.connection is not before


def test_one_caller_connects_for_all(server: QuickServer, namespace: str) -> None:
    """Many tasks at once make one connection; the one for the shortest session is closed."""

    async def run() -> int:
        async with holdfast.connect_async(server.url, namespace=namespace, ttl=TTL) as locks:

            async def one(number: int) -> None:
                async with locks.lock(f"name {number}"):
                    pass

            before = int(server.ask("srvr").split("Connections:")[1].split()[0])
            await asyncio.gather(*(one(number) for number in range(20)))
            return int(server.ask("srvr").split("Connections:")[1].split()[0]) - before

    assert asyncio.run(run()) <= 1


def test_another_caller_connects_if_the_first_is_stuck(locks: holdfast.Locks) -> None:
    """The first may be a task of an event loop that is blocked."""
    session = session_of(locks, TTL)
    session.disconnect()
    session._opening[0] = stuck = Opening()
    begun = now()
    assert hold(locks, "name") > 0
    assert now() - begun > STUCK_SECONDS / 2
    assert stuck not in session._opening.values()


def test_a_task_that_is_cancelled_while_it_connects(server: QuickServer, namespace: str) -> None:
    """The next one connects."""

    async def run() -> None:
        async with holdfast.connect_async(server.url, namespace=namespace, ttl=TTL) as locks:
            for turns in range(12):
                task = asyncio.create_task(locks.lock("name").acquire())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            async with locks.lock("name", timeout=SOON) as lease:
                assert lease.held

    asyncio.run(run())


def test_a_connection_in_use_delays_no_other_heartbeat(server: QuickServer, namespace: str) -> None:
    """A signal handler may run for long on a thread that was sending or reading."""
    with (
        holdfast.connect(server.url, namespace=namespace, ttl=2) as first,
        holdfast.connect(server.url, namespace=namespace, ttl=2) as second,
    ):
        one: Any = session_of(first, 2).connection
        other = session_of(second, 2)
        with one._mutex:
            begun = now()
            wait_until(
                "heartbeats", lambda: len([b for b in other._heartbeats if b > begun]) > 2, SOON
            )


def test_a_session_that_is_connected_again_during_its_turn() -> None:
    """The thread of the heartbeats has seen the old connection, which is over."""

    class Session:
        turns = 0

        def beat(self, moment: float) -> Turn | None:
            self.turns += 1
            if self.turns == 1:
                connecting = threading.Thread(target=heartbeats.add, args=(self,))
                connecting.start()
                connecting.join()
            return None

    session = Session()
    heartbeats.add(session)
    wait_until("the next turn", lambda: session.turns > 1, FEW_SECONDS)


def test_a_connection_that_is_replaced_wakes_its_watches(
    server: QuickServer, locks: holdfast.Locks
) -> None:
    """The server drops the watches of the old connection."""
    session, woken = session_of(locks, TTL), list[int]()
    before = session.connection
    session.watch("/watched", lambda: woken.append(1))
    run_now(session._connect_to(WORLD, server.host, server.port, now() + SOON))
    assert before is not None
    assert before.over
    assert session.up
    assert woken
    session.watches = type(session.watches)()


def test_servers_that_have_lost_their_data(locks: holdfast.Locks) -> None:
    """They refuse clients with a newer state, also those whose session has expired."""
    session = session_of(locks, TTL)
    session.disconnect()
    session._expire()
    session._zxid, session._last_up = 2**62, now() - 3600
    with locks.lock("name", timeout=FEW_SECONDS) as lease:
        assert lease.held


def test_a_server_that_grants_a_known_session_less_time(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session goes on at the next server; the ttl is not refused for good."""
    session, connect, shortened = session_of(locks, TTL), greeting.connect, list[Greeting]()
    number = session.id

    async def connect_and_shorten(*values: Any) -> Greeting:
        granted = await connect(*values)
        if not shortened:
            granted = granted._replace(timeout_ms=1000)
            shortened.append(granted)
        return granted

    monkeypatch.setattr(greeting, "connect", connect_and_shorten)
    session.disconnect()
    assert hold(locks, "name") > 0
    assert shortened
    assert session.id == number


@pytest.mark.parametrize("sent", [Multi([Check("/a")]), Checks(["/a"])])
def test_a_transaction_without_results(locks: holdfast.Locks, sent: Multi) -> None:
    """An answer that is normal for one request tells nothing about the parts of a transaction."""
    session = session_of(locks, TTL)
    sent.answer(NoNode.code, b"")
    with pytest.raises(BackendUnavailable, match="NoNode"):
        session._raise_failure(True, SOON, [sent])
