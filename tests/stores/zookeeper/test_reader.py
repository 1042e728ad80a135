"""Threads that wait for ZooKeeper read its answers themselves: nobody is left without a reader."""

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
TAKING = [
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
        for step in TAKING
    ],
)
def test_a_reader_that_is_torn(
    locks: holdfast.Locks, owner: type[object], name: str, line: int
) -> None:
    """Others get their answers all the same, in the same session, and so does it."""
    session = session_of(locks, TTL)
    number = session.id
    torn_at(getattr(owner, name).__code__, line, lambda: hold(locks, "name"))
    with ThreadPoolExecutor(1) as pool:
        token = pool.submit(hold, locks, "name").result(SOON)
    assert hold(locks, "name") > token
    assert session.id == number


def test_one_who_waits_reads_for_all(locks: holdfast.Locks, others: holdfast.Locks) -> None:
    """Those who wait for an answer beside it, and those who go on when it has left."""
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


def test_nobody_reads_a_connection_that_broke(locks: holdfast.Locks) -> None:
    """Not one either who took the reader's place in that moment: there may be another by then, on
    which hands are being shaken."""
    session = session_of(locks, TTL)
    reader, readers = session.reader, list[threading.Thread]()
    read, wire = reader.read, reader._socket

    class Breaking(dict[int, object]):
        def setdefault(self, key: int, value: object = None) -> object:
            reader_of_all = super().setdefault(key, value)
            if reader_of_all is value and isinstance(value, BlockingCompletion) and reader._socket:
                reader.detach()
            return reader_of_all

    def note() -> bool:
        readers.append(threading.current_thread())
        return read()

    reader._reading, reader.read = Breaking(), note
    assert hold(locks, "name") > 0
    assert reader._socket is None
    assert readers
    assert threading.current_thread() not in readers
    reader._reading, reader.read, reader._socket = {}, read, wire


def test_kazoo_keeps_its_place_while_it_reads() -> None:
    """What it has begun to take in is for it to end: it leaves nothing to others in between."""
    left: list[int] = []

    class Places(dict[int, object]):
        def __delitem__(self, key: int) -> None:
            left.append(key)
            super().__delitem__(key)

    class Pending:
        unread = 1

        def pending(self) -> int:
            return self.unread

    reader, wire = SharedReader(shared=True), Pending()
    handler = KazooHandler(1.0, None, reader)
    handler.listener, handler.queue = cast("Any", object()), lambda: [1]
    reader._reading = Places()
    assert reader.acquire()
    assert handler.select([wire, "bell"], [], []) == ([wire], [], [])
    assert not left
    wire.unread = 0
    assert handler.select([wire, "bell"], [], []) == (["bell"], [], [])
    assert left == [0]


def test_kazoo_reads_what_nobody_waits_for(locks: holdfast.Locks) -> None:
    """Soon after the last of those who waited has left."""
    session = session_of(locks, TTL)
    told = threading.Event()
    session.send(Exists("/").then(lambda _: told.set()))
    assert told.wait(SOON)
