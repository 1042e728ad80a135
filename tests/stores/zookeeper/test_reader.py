"""Threads that wait for ZooKeeper read its replies themselves: there is always a reader."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

import holdfast
from hazards.tearing import lines_of, torn_at
from holdfast.stores.zookeeper.client.completion import BlockingCompletion
from holdfast.stores.zookeeper.client.connection import ZooKeeperConnection
from holdfast.stores.zookeeper.client.handler import KazooHandler
from holdfast.stores.zookeeper.client.packets import Exists, Request
from holdfast.stores.zookeeper.client.reader import SharedReader
from servers.process import wait_until
from stores.zookeeper import helpers
from stores.zookeeper.helpers import TTL, hold, session_of

SOON = 60.0
READING = [
    *lines_of(SharedReader.wait),
    *lines_of(SharedReader._end_wait),
    *lines_of(SharedReader._release_role),
    *lines_of(SharedReader._read_until),
    *lines_of(SharedReader._read_available),
]
DISPATCHING = [
    *lines_of(ZooKeeperConnection.read),
    *lines_of(ZooKeeperConnection._dispatch),
    *lines_of(Request.complete),
]
server, locks, others = helpers.server, helpers.locks, helpers.others


@pytest.mark.parametrize(
    ("owner", "name", "line"),
    [(SharedReader, *step) for step in READING]
    + [
        (Request if step in lines_of(Request.complete) else ZooKeeperConnection, *step)
        for step in DISPATCHING
    ],
)
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
    assert session.reader._reading == {}
    assert session.reader._waiting == {}


def test_no_thread_reads_a_broken_connection(locks: holdfast.Locks) -> None:
    """Not even a thread that has just taken the role: there may be a new connection, in the middle
    of its handshake."""
    session = session_of(locks, TTL)
    reader, readers = session.reader, list[threading.Thread]()
    read, sock = reader.read, reader._socket

    class Breaking(dict[int, object]):
        def setdefault(self, key: int, value: object = None) -> object:
            current = super().setdefault(key, value)
            if current is value and isinstance(value, BlockingCompletion) and reader._socket:
                reader.detach()
            return current

    def note() -> bool:
        readers.append(threading.current_thread())
        return read()

    reader._reading, reader.read = Breaking(), note
    assert hold(locks, "name") > 0
    assert reader._socket is None
    assert readers
    assert threading.current_thread() not in readers
    reader._reading, reader.read, reader._socket = {}, read, sock


def test_kazoo_keeps_the_role_while_it_reads() -> None:
    """No other thread reads in the middle of a reply that kazoo has begun to read."""
    left: list[int] = []

    class Roles(dict[int, object]):
        def __delitem__(self, key: int) -> None:
            left.append(key)
            super().__delitem__(key)

    class Pending:
        unread = 1

        def pending(self) -> int:
            return self.unread

    reader, sock = SharedReader(shared=True), Pending()
    handler = KazooHandler(1.0, None, reader)
    handler.listener, handler.queue = cast("Any", object()), lambda: [1]
    reader._reading = Roles()
    assert reader.acquire()
    assert handler.select([sock, "wakeup"], [], []) == ([sock], [], [])
    assert not left
    sock.unread = 0
    assert handler.select([sock, "wakeup"], [], []) == (["wakeup"], [], [])
    assert left == [0]


def test_kazoo_reads_if_no_thread_waits(locks: holdfast.Locks) -> None:
    """Soon after the last waiting thread has gone."""
    session = session_of(locks, TTL)
    answered = threading.Event()
    session.send(Exists("/").then(lambda _: answered.set()))
    assert answered.wait(SOON)
