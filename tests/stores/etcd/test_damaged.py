"""Replies that are not etcd's raise an error, within bounds of time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, HoldfastError, Unsupported
from holdfast.io import http2
from holdfast.io.clock import now
from holdfast.io.connection import Stream
from holdfast.stores._consensus.hosts import TRUSTED_IDLE_SECONDS, Hosts
from holdfast.stores.etcd.calls import (
    GRANT,
    KEEP_ALIVE,
    RANGE,
    Credentials,
    Endpoint,
    GrpcConnection,
    Reply,
)
from holdfast.stores.etcd.messages import data, integer, lease_reply
from holdfast.stores.etcd.wakeups import WatchConnection, WatchTable
from holdfast.testing import Flavour
from servers.etcd import EtcdServer
from servers.registry import Servers
from servers.tls import make_certificate
from stores.claims import claim_of
from stores.etcd.grpc_server import HEADER, SETTINGS, answering, frame, grpc_reply, headers
from stores.fake_server import ConnectionHandler, fake_server
from stores.http_peer import peers

SOON = 20.0
SMALL = 100_000
MORE_THAN_ENOUGH = 100 * 2**20
IDLE = 5 * TRUSTED_IDLE_SECONDS
every_flavour = pytest.mark.parametrize("flavour", list(Flavour))
LEASE = HEADER + integer(2, 5) + integer(3, 30)
MESSAGES = [
    b"",
    b"\xff",
    HEADER,
    LEASE,
    HEADER + integer(2, 1),
    HEADER + integer(2, 1) + data(3, b""),
    HEADER + integer(2, 1) + data(3, data(1, b"")),
    HEADER + data(2, b"x"),
    HEADER + data(2, b"token\r\n"),
    HEADER + integer(2, 2**63),
    b"\x0a\xff\xff\xff\x7f",
]
REPLIES: list[Callable[[int], bytes]] = [
    *(lambda number, body=body: grpc_reply(number, body) for body in MESSAGES),
    lambda number: grpc_reply(number, b"", 12, "unknown service"),
    lambda number: grpc_reply(number, b"", 14, "etcdserver: no leader"),
    lambda number: grpc_reply(number, b"", 99, "%ff%"),
    lambda number: headers(number, (":status", "404"), end=True),
    lambda number: headers(number, (":status", "200"), end=True),
    lambda number: headers(number, (":status", "x"), ("grpc-status", "0"), end=True),
    lambda number: headers(number, (":status", "200"), ("grpc-status", "²"), end=True),
    lambda number: grpc_reply(number, LEASE).replace(b"\0\0\0\0\x18", b"\x01\0\0\0\x18"),
    lambda number: frame(3, 0, number, struct.pack(">I", 8)),
    lambda number: frame(7, 0, 0, struct.pack(">II", 0, 0)),
    lambda number: frame(0, 0, number, b"x"),
    lambda number: b"HTTP/1.1 400 Bad Request\r\n\r\n",
]


def _take(url: str, flavour: Flavour) -> None:
    """Try to acquire a lock, to list locks and to check the store."""

    async def run() -> None:
        async with holdfast.connect_async(url, patience=0.2, timeout=0.2) as locks:
            with pytest.raises((BackendUnavailable, Unsupported)):
                await locks.lock("name").acquire(blocking=False)

    if flavour is Flavour.ASYNCIO:
        asyncio.run(run())
        return
    with holdfast.connect(url, patience=0.2, timeout=0.2) as locks:
        with pytest.raises((BackendUnavailable, Unsupported)):
            locks.lock("name").acquire(blocking=False)
        for step in (locks.list, locks.check):
            with contextlib.suppress(HoldfastError):
                step()


@every_flavour
@pytest.mark.parametrize("user", ["", "user:password@"], ids=["alone", "signed in"])
def test_a_reply_of_another_shape_raises_a_store_error(user: str, flavour: Flavour) -> None:
    for reply in REPLIES:
        with fake_server(answering(reply)) as port:
            _take(f"etcd://{user}127.0.0.1:{port}", flavour)


@pytest.mark.parametrize(
    "reply",
    [
        lambda number: grpc_reply(number, b"", 12, "unknown service etcdserverpb.KV"),
        lambda number: headers(number, (":status", "404"), end=True),
        lambda number: headers(number, (":status", "200"), ("content-type", "text/html"), end=True),
        lambda number: grpc_reply(number, b"{}"),
    ],
    ids=["another service", "no page", "a page", "another message"],
)
def test_a_server_of_http2_that_is_not_etcd_is_refused_at_once(
    reply: Callable[[int], bytes],
) -> None:
    with (
        fake_server(answering(reply)) as port,
        holdfast.connect(f"etcd://127.0.0.1:{port}") as locks,
    ):
        for step in (locks.list, locks.lock("name").acquire):
            with pytest.raises(BackendUnavailable, match="etcd") as caught:
                step()
            assert caught.value.final


@pytest.mark.parametrize("status", ["429", "502", "503"])
def test_a_proxy_that_is_busy_is_not_final(status: str) -> None:
    busy = answering(lambda number: headers(number, (":status", status), end=True))
    with (
        fake_server(busy) as port,
        holdfast.connect(f"etcd://127.0.0.1:{port}", patience=0.1) as locks,
    ):
        with pytest.raises(BackendUnavailable) as caught:
            locks.lock("name").acquire(blocking=False)
        assert not caught.value.final


@pytest.mark.parametrize(
    "reply",
    [
        Reply(0, b""),
        Reply(0, b"\0"),
        Reply(0, HEADER),
        Reply(0, HEADER + integer(2, 5)),
        Reply(404, b""),
    ],
    ids=["empty", "no message", "no lease", "another lease", "404"],
)
def test_a_renewal_that_is_not_etcds_loses_no_hold(
    servers: Servers, namespace: str, reply: Reply
) -> None:
    """Only an answer of the store itself ends a session."""
    with peers(servers.of(EtcdServer).url, namespace) as make:
        one = make()
        grant = one.take(claim_of())
        ask = one.post.ask

        async def damaged(line: bytes, body: bytes = b"", until: float | None = None) -> Any:
            return reply if line == KEEP_ALIVE.path else await ask(line, body, until)

        one.post.ask = damaged  # type: ignore[method-assign]
        renewal = run_now(one.backend.renew([grant], [], until=now() + SOON))
        assert renewal.lost == {}
        assert list(renewal.unknown) == [grant.claim.owner]
        one.post.ask = ask  # type: ignore[method-assign]
        renewal = run_now(one.backend.renew([grant], [], until=now() + SOON))
        assert (renewal.lost, renewal.unknown) == ({}, {})


def _refused(url: str, flavour: Flavour) -> None:
    """One attempt, which must fail."""

    async def run() -> None:
        async with holdfast.connect_async(url, patience=0.1) as locks:
            with pytest.raises(BackendUnavailable):
                await locks.lock("name").acquire(blocking=False)

    if flavour is Flavour.ASYNCIO:
        asyncio.run(run())
        return
    with (
        holdfast.connect(url, patience=0.1) as locks,
        pytest.raises(BackendUnavailable),
    ):
        locks.lock("name").acquire(blocking=False)


def _without_end(head: bytes, piece: bytes, sent: list[int]) -> ConnectionHandler:
    """Return a handler that sends ``head`` and then pieces without end, while the client reads."""

    def handle(connection: socket.socket) -> None:
        connection.recv(65_536)
        connection.sendall(SETTINGS + head)
        while sum(sent) < MORE_THAN_ENOUGH:
            connection.sendall(piece)
            sent.append(len(piece))

    return handle


@every_flavour
@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (headers(1, (":status", "200")), frame(0, 0, 1, b"x" * 16_384)),
        (frame(1, 0, 1, b""), frame(9, 0, 1, b"") * 1000),
        (frame(1, 0, 1, b""), frame(9, 0, 1, b"x" * 1000)),
    ],
    ids=["body", "empty header", "header"],
)
def test_a_reply_without_end_is_given_up(
    head: bytes, piece: bytes, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the largest size of a reply, not at the timeout."""
    monkeypatch.setattr(http2, "MOST_BODY_BYTES", SMALL)
    sent: list[int] = []
    with fake_server(_without_end(head, piece, sent)) as port:
        _refused(f"etcd://127.0.0.1:{port}", flavour)
    assert sum(sent) < MORE_THAN_ENOUGH


@every_flavour
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_server_that_does_not_offer_http2(
    flavour: Flavour, tls: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Over TLS it is known from the handshake, before anything is sent."""
    own = make_certificate(tmp_path_factory.mktemp("tls"))
    received: list[bytes] = []

    def handle(connection: socket.socket) -> None:
        received.append(connection.recv(65_536))
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with fake_server(handle, own if tls else None) as port:
        url = (
            f"etcds://localhost:{port}?ca={own.certificate}" if tls else f"etcd://localhost:{port}"
        )
        _refused(url, flavour)
    assert any(received) is not tls


@every_flavour
def test_a_reply_that_drips_ends_in_time(flavour: Flavour) -> None:
    """A byte now and then does not extend the deadline."""
    over = threading.Event()

    def handle(connection: socket.socket) -> None:
        connection.recv(65_536)
        for byte in SETTINGS + frame(6, 0, 0, b"12345678") * 100:
            connection.sendall(bytes([byte]))
            if over.wait(0.2):
                return

    async def ask() -> None:
        async with holdfast.connect_async(url) as locks:
            with pytest.raises(BackendUnavailable):
                await locks.lock("name", timeout=1).acquire()

    with fake_server(handle) as port:
        url = f"etcd://127.0.0.1:{port}"
        begun = now()
        if flavour is Flavour.ASYNCIO:
            asyncio.run(ask())
        else:
            with holdfast.connect(url) as locks, pytest.raises(BackendUnavailable):
                locks.lock("name", timeout=1).acquire()
        assert now() - begun < SOON / 2
        over.set()


@every_flavour
@pytest.mark.parametrize("later", [False, True], ids=["with the reply", "later"])
def test_a_goodbye_after_a_reply_costs_nothing(flavour: Flavour, later: bool) -> None:
    """The next request opens another connection."""
    goodbye = frame(7, 0, 0, struct.pack(">II", 1, 0))
    answered, said, connections = threading.Semaphore(0), threading.Semaphore(0), []

    def handle(connection: socket.socket) -> None:
        connections.append(connection)
        connection.recv(65_536)
        reply = SETTINGS + grpc_reply(1, HEADER)
        connection.sendall(reply if later else reply + goodbye)
        if later:
            answered.acquire(timeout=SOON)
            connection.sendall(goodbye)
        said.release()
        connection.recv(65_536)

    async def run() -> None:
        async with holdfast.connect_async(url) as locks:
            for _ in range(3):
                assert await locks.list() == []
                answered.release()
                assert await asyncio.to_thread(said.acquire, timeout=SOON)
                await asyncio.sleep(IDLE)

    with fake_server(handle) as port:
        url = f"etcd://127.0.0.1:{port}"
        if flavour is Flavour.ASYNCIO:
            asyncio.run(run())
        else:
            with holdfast.connect(url) as locks:
                for _ in range(3):
                    assert locks.list() == []
                    answered.release()
                    assert said.acquire(timeout=SOON)
                    threading.Event().wait(IDLE)
    assert len(connections) >= 3


def _grpc_connection(sock: socket.socket) -> GrpcConnection:
    hosts = Hosts("etcd://test", (("test", 1),), tls=None, request_seconds=1.0)
    connection = GrpcConnection(sock, 0, Endpoint(hosts, Credentials(None, None)))
    connection.send((RANGE.path, b""))
    return connection


@pytest.mark.parametrize(
    "connect",
    [_grpc_connection, lambda sock: WatchConnection(sock, b"\x83")],
    ids=["call", "watch"],
)
def test_replies_that_the_server_does_not_read_have_a_limit(
    connect: Callable[[socket.socket], Stream],
) -> None:
    """The server sends pings and reads nothing: what can't be written does not grow without end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = connect(ours)
        theirs.sendall(SETTINGS)
        connection.collect()
        pings = frame(6, 0, 0, b"12345678") * 900

        def flood() -> None:
            for _ in range(4 * 2**20 // len(pings)):
                theirs.sendall(pings)
                connection.collect()

        with pytest.raises(http2.Http2Error, match="does not read"):
            flood()
        assert len(connection.unsent) <= 3 * http2.MOST_ANSWER_BYTES


@pytest.mark.parametrize("path", [GRANT.path, KEEP_ALIVE.path], ids=["grant", "keep-alive"])
def test_a_lease_that_is_too_short_is_damaged(
    servers: Servers, namespace: str, path: bytes
) -> None:
    """Its holds would end before the time that they were promised."""
    with peers(servers.of(EtcdServer).url, namespace) as make:
        one = make()
        if path == KEEP_ALIVE.path:
            one.take(claim_of(ttl=30.0))
        ask = one.post.ask

        async def shorter(line: bytes, body: bytes = b"", until: float | None = None) -> Any:
            reply = await ask(line, body, until)
            if line != path:
                return reply
            found = lease_reply(reply.body)
            cut = HEADER + integer(2, int(found.id)) + integer(3, found.ttl - 1)
            return Reply(0, cut)

        one.post.ask = shorter  # type: ignore[method-assign]
        step = (
            one.backend.leases.session(30.0)
            if path == GRANT.path
            else one.backend.leases.keep_alive(one.store.sessions.current(30.0).id)
        )
        with pytest.raises(BackendUnavailable, match="a lease of 29 s"):
            one.run(step)


def test_the_text_of_a_refusal_is_safe_to_print() -> None:
    text = "%1b]0;title%07%0d%0aERROR forged %e2%80%ae" + "x" * 5000
    with (
        fake_server(answering(lambda number: grpc_reply(number, b"", 9, text))) as port,
        holdfast.connect(f"etcd://127.0.0.1:{port}", patience=0.1) as locks,
    ):
        with pytest.raises(BackendUnavailable, match="forged") as caught:
            locks.lock("name").acquire(blocking=False)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000
    table = WatchTable()
    table.subscribe("session", data(1, b"a"), ["session"])
    refused = HEADER + integer(2, 1) + integer(3, 1) + integer(4, 1) + data(6, b"\x1b[2J")
    with pytest.raises(ConnectionError, match="refused a watch") as broken:
        table.received(refused)
    assert str(broken.value).isprintable()


WATCH_MESSAGES = [
    b"",
    b"\xff",
    integer(2, 1) + integer(3, 1),
    data(1, integer(4, 1)) + integer(2, 1) + integer(3, 1),
    HEADER + integer(2, 1) + data(11, b""),
    HEADER + integer(2, 1) + data(11, data(2, b"")),
    HEADER + integer(2, 1) + data(11, data(2, data(1, b"k"))),
    HEADER + integer(2, 1) + data(11, data(2, data(1, b"k") + integer(3, 1) + data(5, b"\xff"))),
    HEADER + data(2, b"1"),
    HEADER + integer(2, 2**64 - 1) + integer(3, 1) + integer(4, 1),
]


@pytest.mark.parametrize("message", WATCH_MESSAGES, ids=range(len(WATCH_MESSAGES)))
def test_a_message_that_is_not_etcds_ends_the_watches(message: bytes) -> None:
    """And so does the refusal of a watch, which may have no number."""
    table = WatchTable()
    table.subscribe("session", data(1, b"a"), ["session"])
    with pytest.raises(ConnectionError, match=r"not etcd's|refused a watch"):
        table.received(message)
