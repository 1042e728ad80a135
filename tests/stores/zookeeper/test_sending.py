"""Every thread sends its own requests to ZooKeeper: interrupts, full sockets, signal handlers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from kazoo.exceptions import ConnectionLoss

import holdfast
from holdfast.stores.zookeeper.client.handler import BufferedSocket
from holdfast.stores.zookeeper.client.packets import Delete, Exists
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


@pytest.mark.parametrize("bytes_taken", [1, 7, 64])
def test_a_socket_that_accepts_little_at_a_time(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch, bytes_taken: int
) -> None:
    """kazoo's thread sends the rest, before any other request."""
    send_now = BufferedSocket.send_now

    def send_little(sock: BufferedSocket, data: bytes | bytearray) -> int:
        return send_now(sock, data[:bytes_taken])

    monkeypatch.setattr(BufferedSocket, "send_now", send_little)

    def hold(number: int) -> list[int]:
        tokens = []
        for _ in range(5):
            with locks.lock(f"name{number % 2}", timeout=SOON) as lease:
                tokens.append(lease.token)
        return tokens

    with ThreadPoolExecutor(6) as pool:
        tokens = [token for own in pool.map(hold, range(6)) for token in own]
    assert len(set(tokens)) == 30


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
        send_now, us = BufferedSocket.send_now, threading.get_ident()

        def send_and_interrupt(sock: BufferedSocket, data: bytes | bytearray) -> int:
            sent = send_now(sock, data)
            if threading.get_ident() != us:
                return sent  # a heartbeat
            monkeypatch.setattr(BufferedSocket, "send_now", send_now)
            raise KeyboardInterrupt

        monkeypatch.setattr(BufferedSocket, "send_now", send_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.send(Exists("/"))
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
        assert isinstance(pending.error, ConnectionLoss)
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


def test_a_withdrawn_request_is_never_sent() -> None:
    """A harmless read is sent instead. A request that was packed can't be withdrawn."""
    request = Delete("/holdfast/another")
    assert request.withdraw() is True
    assert b"another" not in request.pack(1)
    sent = Delete("/holdfast/another")
    assert b"another" in sent.pack(1)
    assert sent.withdraw() is False
