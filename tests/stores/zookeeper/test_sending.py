"""Every thread and task sends its own requests to ZooKeeper: interrupts, full sockets, handlers."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import holdfast
from holdfast.stores.zookeeper.client.greeting import ZooKeeperStream
from holdfast.stores.zookeeper.client.packets import ConnectionLost, Exists
from servers.proxy import Proxy
from stores.zookeeper import helpers
from stores.zookeeper.helpers import TTL, QuickServer, hold, session_of

SOON = 60.0
server, locks = helpers.server, helpers.locks


class Interrupting(Exists):
    """A request that is interrupted while it is packed."""

    __slots__ = ()

    def pack(self, xid: int) -> bytes:
        raise KeyboardInterrupt


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Makes every socket take little at a time."""
    init = ZooKeeperStream.__init__

    def begin(stream: Any, sock: Any) -> None:
        init(stream, sock)
        stream._write = lambda data: sock.send(data[: request.param])

    monkeypatch.setattr(ZooKeeperStream, "__init__", begin)


taking_little = pytest.mark.parametrize("little", [1, 7, 64], indirect=True)


@taking_little
@pytest.mark.usefixtures("little")
def test_a_socket_that_accepts_little_at_a_time(locks: holdfast.Locks) -> None:
    """The rest is sent before any other request, by whoever waits."""

    def hold(number: int) -> list[int]:
        tokens = []
        for _ in range(5):
            with locks.lock(f"name{number % 2}", timeout=SOON) as lease:
                tokens.append(lease.token)
        return tokens

    with ThreadPoolExecutor(6) as pool:
        tokens = [token for own in pool.map(hold, range(6)) for token in own]
    assert len(set(tokens)) == 30


@taking_little
@pytest.mark.usefixtures("little")
def test_the_same_on_an_event_loop(server: QuickServer, namespace: str) -> None:
    async def run() -> list[int]:
        async with holdfast.connect_async(server.url, namespace=namespace, ttl=TTL) as locks:

            async def hold(number: int) -> int:
                async with locks.lock(f"name{number % 2}", timeout=SOON) as lease:
                    return lease.token

            return await asyncio.gather(*(hold(number) for number in range(20)))

    assert len(set(asyncio.run(run()))) == 20


@pytest.mark.parametrize("moment", ["packing", "sent"])
def test_an_interrupt_costs_the_connection_and_no_hold(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It is unknown which replies would arrive: the session continues on a new connection."""
    session = session_of(locks, TTL)
    kept = locks.lock("kept").acquire()
    assert kept
    number = session.id
    if moment == "packing":
        with pytest.raises(KeyboardInterrupt):
            session.send(Interrupting("/"))
    else:
        send, us = ZooKeeperStream.send, threading.get_ident()

        def send_and_interrupt(stream: ZooKeeperStream, data: bytes) -> None:
            send(stream, data)
            if threading.get_ident() == us:  # else a heartbeat
                monkeypatch.undo()
                raise KeyboardInterrupt

        monkeypatch.setattr(ZooKeeperStream, "send", send_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.send(Exists("/"))
    assert not session.up
    with locks.lock("name", timeout=SOON) as lease:
        assert lease.token > kept.token
    assert session.id == number
    kept.check()
    assert kept.release() is True


def test_an_interrupt_fails_pending_requests(server: QuickServer) -> None:
    """Even if the servers are silent, so that only the client knows of the connection's end."""
    with Proxy(server) as proxy, holdfast.connect(proxy.url, ttl=TTL) as locks:
        session = session_of(locks, TTL)
        proxy.stall()
        failed = threading.Event()
        pending = Exists("/")
        session.send(pending.then(lambda _: failed.set()))
        with pytest.raises(KeyboardInterrupt):
            session.send(Interrupting("/"))
        assert failed.wait(SOON)
        assert isinstance(pending.error, ConnectionLost)
        proxy.resume()


def test_a_signal_handler_may_send(locks: holdfast.Locks) -> None:
    """In the middle of packing a request it ends the connection; all requests get a result."""
    session = session_of(locks, TTL)
    number = session.id
    order: list[str] = []
    done = threading.Event()

    class Interrupted(Exists):
        __slots__ = ()

        def pack(self, xid: int) -> bytes:
            session.send(Exists("/").then(lambda _: done.set()))
            return super().pack(xid)

    first = Interrupted("/").then(lambda _: order.append("first"))
    last = Exists("/").then(lambda _: order.append("last"))
    session.send(first, last)
    assert done.wait(SOON)
    assert order == ["first", "last"]
    assert first.error is not None
    assert hold(locks, "name") > 0
    assert session.id == number


def test_a_request_without_a_connection_fails(locks: holdfast.Locks) -> None:
    """It is not kept for the next connection: nobody would know whether it was executed."""
    session = session_of(locks, TTL)
    session.disconnect()
    request = Exists("/")
    session.send(request)
    assert isinstance(request.error, ConnectionLost)
