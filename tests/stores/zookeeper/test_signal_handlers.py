"""Signal handlers that use ZooKeeper locks, at any line of our own code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import holdfast
from hazards.tearing import handled_at, lines_of
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores.zookeeper.client.connection import SharedConnection
from holdfast.stores.zookeeper.session import Watches, ZooKeeperSession
from holdfast.stores.zookeeper.store import ZooKeeperStore
from servers.process import wait_until
from stores.zookeeper import helpers
from stores.zookeeper.helpers import TTL, hold, session_of

SOON = 60.0
server, locks, others = helpers.server, helpers.locks, helpers.others


def test_a_signal_handler_may_use_locks(locks: holdfast.Locks, others: holdfast.Locks) -> None:
    """It occupies the thread that reads for others: the handler reads itself."""
    session_of(locks, TTL)
    tokens: list[int] = []
    held = others.lock("name").acquire()
    assert held
    waits = threading.Event()

    def interrupt() -> None:
        wait_until("a waiter", lambda: len(others.inspect("name").waiters) == 1, SOON)
        waits.set()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def handle(*_: object) -> None:
        tokens.append(hold(locks, "other"))
        held.release()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        tokens.append(hold(locks, "name"))
        thread.join(SOON)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert waits.is_set()
    assert len(tokens) == 2


Step = tuple[type[object], str, int]
WATCHING: list[Step] = [
    *(
        (ZooKeeperSession, *step)
        for step in [*lines_of(ZooKeeperSession.watch), *lines_of(ZooKeeperSession.unwatch)]
    ),
    *((Watches, *step) for step in [*lines_of(Watches.add), *lines_of(Watches.remove)]),
]
OPENING: list[Step] = [
    *((ZooKeeperSession, *step) for step in lines_of(ZooKeeperSession.open)),
    *((ZooKeeperSession, *step) for step in lines_of(ZooKeeperSession._open_once)),
    *((ZooKeeperSession, *step) for step in lines_of(ZooKeeperSession._install)),
    *((ZooKeeperStore, *step) for step in lines_of(ZooKeeperStore.session)),
    *((ZooKeeperStore, *step) for step in lines_of(ZooKeeperStore._new_session)),
]


MIDDLE: list[Step] = [
    (SharedConnection, *step)
    for function in (
        SharedConnection.send,
        SharedConnection._pack,
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


@pytest.mark.parametrize(("owner", "name", "line"), MIDDLE)
def test_a_handler_waits_in_the_middle_of_a_request(
    locks: holdfast.Locks, owner: type[object], name: str, line: int
) -> None:
    """The connection ends, with what its thread was sending or reading: both get their locks soon,
    in the same session."""
    session = session_of(locks, TTL)
    number = session.id
    got: list[str] = []

    def get(each: str) -> None:
        with locks.lock(each, timeout=SOON):
            got.append(each)

    code = getattr(owner, name).__code__
    begun = now()
    _in_a_thread(lambda: handled_at(code, line, lambda: get("name"), lambda: get("other")))
    assert got[-1] == "name"
    assert now() - begun < SOON / 4
    assert session.id == number


def _in_a_thread(work: Callable[[], object]) -> None:
    """So that work that hangs only fails the test."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive()


@pytest.mark.parametrize(("owner", "name", "line"), WATCHING)
def test_a_handler_waits_while_its_thread_begins_to_wait(
    locks: holdfast.Locks, others: holdfast.Locks, owner: type[object], name: str, line: int
) -> None:
    """For another lock of the same session, at any line: both get their locks."""
    session = session_of(locks, TTL)
    held = {each: others.lock(each).acquire() for each in ("name", "other")}
    got: list[str] = []

    def get(each: str) -> None:
        lease = held[each]
        assert lease
        releaser = threading.Thread(target=_once_awaited, args=(others, each, lease.release))
        releaser.start()
        hold(locks, each)
        got.append(each)
        releaser.join(SOON)

    code = getattr(owner, name).__code__
    _in_a_thread(lambda: handled_at(code, line, lambda: get("name"), lambda: get("other")))
    assert got[-1] == "name"
    assert not session.watches
    for lease in held.values():
        assert lease
        lease.release()


def _once_awaited(locks: holdfast.Locks, name: str, then: Callable[[], object]) -> None:
    wait_until("a waiter", lambda: len(locks.inspect(name).waiters) == 1, SOON)
    then()


@pytest.mark.parametrize(("owner", "name", "line"), OPENING)
def test_a_handler_opens_the_session_that_its_thread_is_opening(
    locks: holdfast.Locks, owner: type[object], name: str, line: int
) -> None:
    """There is one session after that; a handler that can't have one yet gets an error."""

    def handle() -> None:
        with suppress(BackendUnavailable), locks.lock("other", timeout=0.2):
            pass

    code = getattr(owner, name).__code__
    _in_a_thread(lambda: handled_at(code, line, lambda: hold(locks, "name"), handle))
    store: Any = locks._engine.store
    (session,) = store.sessions.values()
    assert session.up
    assert hold(locks, "name") > 0
    assert store.sessions == {TTL: session}


def test_several_watch_one_node() -> None:
    """Each callback is kept until it is removed, in any order."""
    watches = Watches()
    signals = [threading.Event() for _ in range(3)]
    for signal_ in signals:
        watches.add("/node", signal_.set)
    watches.add("/another", signals[0].set)
    for left in (signals, signals[1:], signals[2:], []):
        assert watches.of("/node") == [each.set for each in left]
        if left:
            watches.remove("/node", left[0].set)
    assert watches.all() == watches.of("/another") == [signals[0].set]
    watches.remove("/another", signals[0].set)
    assert not watches
