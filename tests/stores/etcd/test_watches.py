"""The watches of a client on etcd: each ends with its wait, and with its own connection."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sized
from typing import Any

import pytest

from holdfast.claim import Busy
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.stores.etcd import requests
from holdfast.stores.etcd.wakeups import WatchTable
from holdfast.testing import Flavour
from servers.etcd import EtcdServer
from servers.process import wait_until
from servers.proxy import Proxy
from stores.claims import claim_of
from stores.etcd import helpers
from stores.http_peer import Peer, peers

SOON = 20.0
LATER = 3 * SOON
server, peer = helpers.server, helpers.peer
Peers = Callable[..., Peer]


def _open(watches: Any) -> Sized:
    """Watches that are not ended."""
    found: Sized = watches._source.table._watches
    return found


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_wait_that_is_cancelled_early_leaves_no_watch(
    peer: Peers, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled or interrupted after the watch was requested and before etcd has confirmed it."""
    ours, theirs = peer(), peer(flavour)
    ours.take(claim_of())
    claim = claim_of()
    busy = theirs.attempt(claim)
    assert isinstance(busy, Busy)
    waits = theirs.backend.waits
    watches = waits.watches
    woken = watches.woken
    asked: list[int] = []

    async def interrupted(owner: str, until: float) -> object:
        asked.append(len(_open(watches)))
        if flavour is Flavour.BLOCKING:
            raise KeyboardInterrupt
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return await woken(owner, until)

    monkeypatch.setattr(watches, "woken", interrupted)
    with pytest.raises((asyncio.CancelledError, KeyboardInterrupt)):
        theirs.run(theirs.backend.wait(claim, busy, now() + LATER))
    assert asked == [1]
    assert len(_open(watches)) == 0


class ManyWaits:
    """Threads of one client, each of which waits for a name that another client holds."""

    def __init__(self, peer: Peers) -> None:
        self.holder, self.one = peer(), peer()
        self.watches = self.one.backend.waits.watches
        self.held = [self.holder.take(claim_of(name)) for name in "abc"]
        self.claims = [claim_of(name) for name in "abc"]
        self.busies = [self.one.attempt(claim) for claim in self.claims]

    def wait(self, number: int) -> threading.Thread:
        """Starts a wait; returns once its watch is confirmed."""
        owner = self.one.store.key_pool.of(self.claims[number])
        work = self.one.backend.wait(self.claims[number], self.busies[number], now() + LATER)
        thread = threading.Thread(target=run_now, args=(work,))
        thread.start()
        wait_until("a wait", lambda: owner in self._waiting(), SOON)
        return thread

    def _waiting(self) -> set[str]:
        """Owners that wait on a confirmed watch."""
        source = self.watches._source
        watches = [] if source is None else list(source.table._watches.values())
        begun = {watch.owner for watch in watches if watch.start_revision is not None}
        return begun & set(self.watches._hub._waiting)


def test_a_connection_that_ends_ends_its_own_watches(
    peer: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that gets the error is so late that another thread has opened a new connection:
    every waiter on the old one is woken, and none on the new one."""
    waits = ManyWaits(peer)
    hub = waits.watches._hub
    wait = hub.wait
    ended, late = threading.Event(), threading.Event()

    def held_up(key: str, until: float) -> bool:
        try:
            woken: bool = wait(key, until)
        except OSError:
            ended.set()
            late.wait(LATER)
            raise
        return woken

    monkeypatch.setattr(hub, "wait", held_up)
    first, second = waits.wait(0), waits.wait(1)
    socket.socket.shutdown(waits.watches._source.connection._sock, socket.SHUT_RDWR)
    assert ended.wait(SOON)
    third = waits.wait(2)
    late.set()
    for thread in (first, second):
        thread.join(SOON)
        assert not thread.is_alive()
    assert not any(watch.broken for watch in waits.watches._source.table._watches.values())
    assert third.is_alive()
    assert run_now(waits.holder.backend.release(waits.held[2]))
    third.join(SOON)
    assert not third.is_alive()


def test_a_watch_is_cancelled_on_its_own_connection() -> None:
    """Every connection numbers its watches from one."""
    old, new = WatchTable(), WatchTable()
    (left, _), (kept, _) = (
        table.create("owner", requests.only(b"a"), True) for table in (old, new)
    )
    assert left.number == kept.number
    assert not new.cancel(left)
    created = helpers.watch_message(kept.number, created=True)
    assert new.received(created) == ["owner"]
    assert new.cancel(kept)
    assert new.received(created) == []


@pytest.mark.parametrize("flavour", list(Flavour))
def test_watches_leave_a_host_that_requests_have_left(
    server: EtcdServer, namespace: str, flavour: Flavour
) -> None:
    """A node that is cut off from its peers confirms watches and never reports an event."""
    url = f"{server.url},{server.host}:{server.port}"
    with peers(url, namespace) as peer:
        one = peer(flavour)
        watches: Any = one.backend.waits.watches

        def host() -> int:
            number: int = watches._source.host
            return number

        def begin(owner: str) -> Any:
            return one.run(watches.begin(owner, requests.only(b"a"), True, now() + SOON))

        first = begin("first")
        assert host() == 0
        one.store.hosts.failed(0)
        second = begin("second")
        assert host() == 1
        assert first.broken
        assert one.run(watches.woken("first", now() + SOON))
        assert not second.broken


@pytest.mark.parametrize("flavour", list(Flavour))
def test_requests_leave_a_host_that_another_backend_has_left(
    server: EtcdServer, namespace: str, flavour: Flavour
) -> None:
    """Idle connections to it are not used any more."""
    with (
        Proxy(server) as first,
        Proxy(server) as second,
        peers(f"{first.url},127.0.0.1:{second.port}", namespace) as peer,
    ):
        one = peer(flavour)
        one.run(one.backend.look("name"))
        assert (first.open_connections, second.open_connections) == (1, 0)
        one.store.hosts.failed(0)
        one.run(one.backend.look("name"))
        assert second.open_connections == 1
        wait_until("the other is closed", lambda: first.open_connections == 0, SOON)
