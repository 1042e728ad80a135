"""A thread or loop that waits for ZooKeeper reads its replies: there is always a reader."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import holdfast
from hazards.tearing import lines_of, torn_at
from holdfast.io.clock import now
from holdfast.stores.zookeeper.client import connection as client_connection
from holdfast.stores.zookeeper.client.completion import BlockingCompletion
from holdfast.stores.zookeeper.client.connection import SharedConnection
from holdfast.stores.zookeeper.client.packets import Exists, Request
from servers.process import wait_until
from stores.zookeeper import helpers
from stores.zookeeper.helpers import TTL, QuickServer, hold, session_of

SOON = 60.0
READING = [
    (SharedConnection, *step)
    for function in (
        SharedConnection.send,
        SharedConnection.collect,
        SharedConnection._read_replies,
        SharedConnection._tell,
        SharedConnection.wait,
        SharedConnection._wait,
        SharedConnection._poll,
        SharedConnection._ready,
        SharedConnection._leave,
    )
    for step in lines_of(function)
]
ANSWERING = [
    (Request, *step) for function in (Request.answer, Request.finish) for step in lines_of(function)
]
WAITING = [(BlockingCompletion, *step) for step in lines_of(BlockingCompletion.done)]
server, locks, others = helpers.server, helpers.locks, helpers.others


@pytest.mark.parametrize(("owner", "name", "line"), [*READING, *ANSWERING, *WAITING])
def test_a_reader_that_is_interrupted(
    locks: holdfast.Locks, owner: type[object], name: str, line: int
) -> None:
    """All threads still get their replies, in the same session."""
    session = session_of(locks, TTL)
    number = session.id
    torn_at(getattr(owner, name).__code__, line, lambda: hold(locks, "name"))
    with ThreadPoolExecutor(1) as pool:
        token = pool.submit(hold, locks, "name").result(SOON)
    assert hold(locks, "name") > token
    assert session.id == number


def test_a_waiting_thread_reads_for_all(locks: holdfast.Locks, others: holdfast.Locks) -> None:
    """For threads that wait for replies at the same time, and after it has gone."""
    session = session_of(locks, TTL)
    with ThreadPoolExecutor(5) as pool:
        with others.lock("name"):
            waiting = pool.submit(hold, locks, "name")
            wait_until("a waiter", lambda: len(others.inspect("name").waiters) == 1, SOON)
            served = [pool.submit(hold, locks, f"other{n % 4}") for n in range(40)]
            assert len({future.result(SOON) for future in served}) == 40
        assert waiting.result(SOON) > 0
    assert session.connection is not None
    assert session.connection._reader == {}
    assert session.connection._waiting == {}


def test_another_thread_reads_when_the_reader_leaves(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that wait for events look at the socket only when it is their turn to read."""
    monkeypatch.setattr(client_connection, "FOLLOW_SECONDS", SOON)
    connection = session_of(locks, TTL).connection
    assert connection is not None
    first, second = BlockingCompletion(), BlockingCompletion()
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(connection.wait, first, now() + SOON, reply=False)
        wait_until("a reader", lambda: connection._reader.get(0) is first, SOON)
        following = pool.submit(connection.wait, second, now() + SOON, reply=False)
        wait_until("a follower", lambda: len(connection._waiting) == 2, SOON)
        first.done()
        assert reading.result(SOON)
        wait_until("the next reader", lambda: connection._reader.get(0) is second, SOON)
        request = Exists("/")
        request.completion = second
        connection.send([request])
        assert following.result(SOON)
    assert request.value is not None


def test_a_thread_reads_for_itself_if_its_reader_is_occupied(
    locks: holdfast.Locks,
) -> None:
    """A signal handler may run for long on the thread that reads."""
    session = session_of(locks, TTL)
    connection = session.connection
    assert connection is not None
    session._next_heartbeat = now() + SOON  # whose thread would read, too, but later
    wait_until("the last heartbeat", lambda: not connection._pending, SOON)
    occupied = BlockingCompletion()
    connection._reader[0] = occupied
    begun = now()
    assert hold(locks, "name") > 0
    assert now() - begun < SOON / 4
    connection._reader.clear()


def test_replies_that_no_thread_waits_for_are_read(locks: holdfast.Locks) -> None:
    """By the thread of the heartbeats."""
    session = session_of(locks, TTL)
    answered = threading.Event()
    session.send(Exists("/").then(lambda _: answered.set()))
    assert answered.wait(SOON)


@pytest.mark.parametrize("ttl", [2])
def test_a_blocked_event_loop_keeps_its_session(
    server: QuickServer, namespace: str, ttl: int
) -> None:
    """Heartbeats and renewals are sent and read by other threads, over the same connection."""

    async def run() -> None:
        opened = holdfast.connect_async(server.url, namespace=namespace, ttl=ttl)
        async with opened as locks, locks.lock("name") as lease:
            store = locks._engine.store
            session = store.sessions[ttl]  # type: ignore[attr-defined]
            number, connection = session.id, session.connection
            time.sleep(3 * session.timeout)
            lease.check()
            assert lease.remaining > 0
            assert (session.id, session.connection) == (number, connection)

    asyncio.run(run())


def test_a_broken_connection_is_closed_once_nobody_waits_for_it(locks: holdfast.Locks) -> None:
    """Its number may be another file's at once: no thread may wait for it then."""
    connection = session_of(locks, TTL).connection
    assert connection is not None
    assert connection.hold_descriptor(connection)
    connection.end(OSError(0, "broken"))
    assert connection._stream.fd == connection.fd
    connection.let_descriptor_go(connection)
    assert connection._stream.fd == -1
    assert not connection.hold_descriptor(connection)
    connection.let_descriptor_go(connection)
