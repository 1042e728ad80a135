"""The asyncio HTTP client of etcd and Consul: other event loops, one loop after another, and a
connection that several tasks wait for."""

from __future__ import annotations

import asyncio
import gc
import importlib
import socket
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.http import Reply
from holdfast.io.runtime_aio import AsyncioRuntime
from holdfast.stores._consensus.hosts import Hosts, Wire
from holdfast.stores.consul.agent import AgentConnection, AgentEndpoint
from servers.consul import ConsulServer
from servers.etcd import EtcdServer
from servers.process import Server
from servers.registry import Servers as Registry

LOOPS = 6

KINDS = [pytest.param(EtcdServer, id="etcd"), pytest.param(ConsulServer, id="consul")]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def without_generator_shutdown(work: Coroutine[Any, Any, None]) -> None:
    """Runs a loop that is closed without ``shutdown_asyncgens``, as older programs do. What is open
    then is left to destructors, which warn."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


@pytest.fixture(params=[asyncio.run, without_generator_shutdown], ids=["run", "plain"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """How a loop is run and ended."""
    gc.collect()
    with warnings.catch_warnings():
        strict = request.param is asyncio.run
        warnings.simplefilter("error" if strict else "ignore", ResourceWarning)
        yield request.param
        gc.collect()


async def use(locks: holdfast.AsyncLocks) -> None:
    """Take a lock, and wait for one, so that every kind of connection is opened."""
    async with locks.lock("loops"):
        other = asyncio.create_task(locks.lock("loops", timeout=0.3).acquire())
        assert await other is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_on_many_loops_keeps_no_connection_of_a_past_one(
    servers: Registry,
    namespace: str,
    kind: type[Server],
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    locks = holdfast.connect_async(servers.of(kind).url, namespace=namespace)
    run(use(locks))
    gc.collect()
    before = open_files()
    for _ in range(LOOPS):
        run(use(locks))
        gc.collect()
    assert open_files() <= before + 2
    run(locks.close())


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_is_closed_in_a_later_loop(
    servers: Registry,
    namespace: str,
    kind: type[Server],
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    locks = holdfast.connect_async(servers.of(kind).url, namespace=namespace)
    run(use(locks))
    run(locks.close())


@pytest.mark.parametrize("kind", KINDS)
def test_a_hold_of_a_past_loop_is_kept(
    servers: Registry, namespace: str, kind: type[Server]
) -> None:
    """The client is used in another loop: the hold is still renewed, and can be released there."""
    locks = holdfast.connect_async(servers.of(kind).url, namespace=namespace)
    held: list[holdfast.AsyncLease] = []

    async def take() -> None:
        lease = await locks.lock("kept").acquire()
        assert lease is not None
        held.append(lease)

    async def go_on() -> None:
        await use(locks)
        await held[0].extend()
        assert await held[0].release() is True
        await locks.close()

    asyncio.run(take())
    asyncio.run(go_on())


def test_closing_ends_the_session_of_a_past_loop(servers: Registry, namespace: str) -> None:
    server = servers.of(ConsulServer)
    locks = holdfast.connect_async(server.url, namespace=namespace)

    def sessions() -> list[str]:
        listed = server.ask("/v1/session/list")
        return [session["ID"] for session in listed if session["Name"].endswith(namespace)]

    asyncio.run(use(locks))
    assert len(sessions()) == 1
    asyncio.run(use(locks))
    assert len(sessions()) == 1
    asyncio.run(locks.close())
    assert sessions() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_works_on_uvloop(servers: Registry, namespace: str, kind: type[Server]) -> None:
    pytest.importorskip("uvloop")
    uvloop: Any = importlib.import_module("uvloop")
    locks = holdfast.connect_async(servers.of(kind).url, namespace=namespace)
    uvloop.run(use(locks))
    uvloop.run(locks.close())


class _BusyOnce(AgentConnection):
    """The program computes for a while in the round of the loop that reads the first response."""

    busy = True

    def feed(self, data: bytes) -> None:
        super().feed(data)
        if _BusyOnce.busy:
            _BusyOnce.busy = False
            time.sleep(0.6)


class _BusyEndpoint(AgentEndpoint):
    def connection(self, sock: socket.socket, host: int) -> AgentConnection:
        return _BusyOnce(sock, host, self)


def test_a_wake_up_is_passed_on_if_its_task_runs_out_of_time_in_the_same_round() -> None:
    arrived, ended = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                arrived.set()
                await asyncio.sleep(0.1)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            ended.set()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        hosts = (("127.0.0.1", server.sockets[0].getsockname()[1]),)
        _BusyOnce.busy = True
        endpoint = _BusyEndpoint(Hosts("x", hosts, tls=None, request_seconds=30))
        http = Wire[Reply](endpoint, 1, AsyncioRuntime())
        first = asyncio.create_task(http.ask(b"POST /a"))
        await arrived.wait()
        # Out of time while the loop is busy with the first response, and woken by that response.
        second = asyncio.create_task(http.ask(b"POST /b", b"", now() + 0.3))
        third = asyncio.create_task(http.ask(b"POST /c"))
        answers = await asyncio.gather(first, second, third, return_exceptions=True)
        assert isinstance(answers[1], BackendUnavailable)
        assert "all 1 connections are busy" in str(answers[1])
        assert isinstance(answers[2], Reply)
        await http.close()
        await ended.wait()
        server.close()

    asyncio.run(main())
