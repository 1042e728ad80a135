"""Answers over HTTP/1.1 that are not Consul's raise an error, within bounds of time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, Unsupported
from holdfast.io import http
from holdfast.io.clock import now
from holdfast.io.http import Reply
from holdfast.io.runtime_aio import AsyncioRuntime
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores._consensus.hosts import Hosts, Tls, Wire
from holdfast.stores.consul.agent import AgentEndpoint
from holdfast.testing import Flavour
from servers.consul import ConsulServer
from servers.registry import Servers as ServerRegistry
from servers.tls import make_certificate
from stores.claims import claim_of
from stores.fake_server import ConnectionHandler, answering, fake_server, http_reply
from stores.http_peer import peers

SMALL = 100_000
"""The largest answer, for a test that does not want to send 64 MiB."""
MORE_THAN_ENOUGH = 100 * 2**20
SOON = 20.0
DEEP = b'{"header":' + b"[" * 100_000
SHAPES = [
    b"[]",
    b"1",
    b"null",
    b'"x"',
    b"{}",
    b"",
    b"\xff",
    DEEP,
    b'{"a":' + b"9" * 5000 + b"}",
    b'{"Results":5}',
    b'{"Results":[1]}',
    b'{"Results":null,"ID":"1","TTL":"30"}',
    b'{"ID":"x","TTL":"y"}',
    b'{"ID":5}',
    b'{"ID":"a\\" b"}',
    b'{"ID":"1","TTL":"nan"}',
    b'{"ID":"1","Results":[{"KV":{}}]}',
    b'{"ID":"1","Results":[{"KV":{"Key":5}}]}',
    b'{"ID":"1","Results":[{"KV":{"Key":"a","CreateIndex":"1","ModifyIndex":1}}]}',
    b'{"ID":"1","Results":[]}',
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
        _answered_or_refused(locks.list)
        _answered_or_refused(locks.check)


def _answered_or_refused(step: Callable[[], object]) -> None:
    """Run a step, which may return a result or raise one of these errors, and no other."""
    with contextlib.suppress(BackendUnavailable, Unsupported):
        step()


@pytest.mark.parametrize("flavour", list(Flavour))
def test_an_answer_of_another_shape_raises_a_store_error(flavour: Flavour) -> None:
    for body in SHAPES:
        with fake_server(answering(http_reply(body))) as port:
            _take(f"consul://127.0.0.1:{port}", flavour)


def test_a_server_that_is_not_consul_is_not_an_empty_one() -> None:
    """It answers 404 to everything. A 404 of Consul itself has another body."""
    with (
        fake_server(answering(http_reply(b"404 page not found\n", "404 Not Found"))) as port,
        holdfast.connect(f"consul://127.0.0.1:{port}", timeout=1) as locks,
    ):
        for step in (locks.list, locks.check, locks.lock("name").acquire):
            with pytest.raises(BackendUnavailable, match="not as Consul") as caught:
                step()
            assert caught.value.final


@pytest.mark.parametrize("body", [b"{}", b"[]", b'"x"', b"<html>"])
def test_a_server_with_other_answers_is_not_consul(body: bytes) -> None:
    """The refusal is final, at once: an acquire does not retry for its timeout."""
    with (
        fake_server(answering(http_reply(body))) as port,
        holdfast.connect(f"consul://127.0.0.1:{port}", timeout=60) as locks,
    ):
        look = partial(locks.inspect, "name")
        for step in (locks.list, locks.lock("name").acquire, locks.check, look):
            with pytest.raises(BackendUnavailable, match="not as Consul") as caught:
                step()
            assert caught.value.final
            assert str(caught.value).count(f"127.0.0.1:{port}") == 1


def test_a_refusal_of_consul_has_its_status() -> None:
    """A proxy's page alone does not say what went wrong."""
    for status in ("301 Moved", "502 Bad Gateway"):
        with (
            fake_server(answering(http_reply(b"<html>", status))) as port,
            holdfast.connect(f"consul://127.0.0.1:{port}") as locks,
            pytest.raises(BackendUnavailable, match=rf"status {status[:3]}: <html>"),
        ):
            locks.list()


@pytest.mark.parametrize(
    "reply",
    [Reply(200, b"{}"), Reply(200, b"null"), Reply(404, b"404 page not found\n")],
    ids=["empty", "null", "404"],
)
def test_a_renewal_that_is_not_the_store_s_loses_no_hold(
    servers: ServerRegistry, namespace: str, reply: Reply
) -> None:
    """Only an answer of the store itself ends a session."""
    with peers(servers.of(ConsulServer).url, namespace) as make:
        one = make()
        grant = one.take(claim_of())
        ask = one.post.ask

        async def damaged(line: bytes, body: bytes = b"", until: float | None = None) -> Any:
            keeps = b"/renew/" in line
            return reply if keeps else await ask(line, body, until)

        one.post.ask = damaged  # type: ignore[method-assign]
        renewal = run_now(one.backend.renew([grant], [], until=now() + SOON))
        assert renewal.lost == {}
        assert list(renewal.unknown) == [grant.claim.owner]
        one.post.ask = ask  # type: ignore[method-assign]
        renewal = run_now(one.backend.renew([grant], [], until=now() + SOON))
        assert (renewal.lost, renewal.unknown) == ({}, {})


def _hosts(port: int, tls: Tls | None = None) -> Hosts:
    name = "localhost" if tls else "127.0.0.1"
    return Hosts("consul://host", ((name, port),), tls=tls, request_seconds=SOON)


def _ask(hosts: Hosts, flavour: Flavour, seconds: float) -> None:
    """Send one request, which must fail."""

    async def ask() -> None:
        runtime = BlockingRuntime() if flavour is Flavour.BLOCKING else AsyncioRuntime()
        wire = Wire[Reply](AgentEndpoint(hosts), 1, runtime)
        try:
            await wire.ask(b"GET /", until=now() + seconds)
        finally:
            await wire.close()

    run = run_now if flavour is Flavour.BLOCKING else asyncio.run
    with pytest.raises(BackendUnavailable):
        run(ask())


def _without_end(head: bytes, sent: list[int]) -> ConnectionHandler:
    """Return a handler that sends ``head`` and then data without end, while the client reads."""

    def handle(connection: socket.socket) -> None:
        connection.recv(65_536)
        connection.sendall(head)
        while sum(sent) < MORE_THAN_ENOUGH:
            sent.append(connection.send(b"x" * 65_536))
        connection.recv(65_536)  # sends no more data and does not close

    return handle


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFF\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nTrailer: ",
        b"HTTP/1.1 200 OK\r\nX: ",
    ],
    ids=["body", "chunk", "trailer", "header"],
)
def test_an_answer_without_end_is_given_up(
    head: bytes, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the largest size of an answer, not at the timeout."""
    monkeypatch.setattr(http, "MOST_ANSWER_BYTES", SMALL)
    sent: list[int] = []
    with fake_server(_without_end(head, sent)) as port:
        begun = now()
        _ask(_hosts(port), flavour, SOON)
        assert now() - begun < SOON / 2


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_an_answer_that_drips_ends_in_time(
    flavour: Flavour, tls: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A byte now and then does not extend the deadline."""
    own = make_certificate(tmp_path_factory.mktemp("tls"))
    over = threading.Event()

    def handle(connection: socket.socket) -> None:
        connection.recv(65_536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n")
        over.wait(1.8)  # nearly until the deadline; then one byte, and no more
        connection.sendall(b"x")
        over.wait(SOON)

    with fake_server(handle, own if tls else None) as port:
        begun = now()
        _ask(_hosts(port, Tls(str(own.certificate)) if tls else None), flavour, 2.0)
        assert now() - begun < 3.0
        over.set()
