"""Which host of etcd requests go to: a host that fails is left, and only such a host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores._consensus.hosts import Wire
from holdfast.stores.etcd import requests
from holdfast.stores.etcd.calls import OK, RANGE, Reply
from holdfast.testing import Flavour
from servers.etcd import EtcdServer
from servers.process import wait_until
from servers.proxy import Proxy
from stores.etcd import helpers
from stores.etcd.grpc_server import answering, grpc_reply
from stores.fake_server import fake_server
from stores.http_peer import Peer, peers

SOON = 20.0
SHORT = 0.1
BODY = requests.only(b"key")
server = helpers.server
every_flavour = pytest.mark.parametrize("flavour", list(Flavour))


class Two(NamedTuple):
    """A client of one server that has two addresses, each through a proxy."""

    first: Proxy
    second: Proxy
    one: Peer
    wire: Wire[Reply]

    @property
    def current(self) -> int:
        return self.wire.hosts.current

    async def ask(self, seconds: float = SOON) -> Reply:
        return await self.wire.ask(RANGE.path, BODY, now() + seconds)

    def run(self, seconds: float = SOON) -> Reply:
        return self.one.run(self.ask(seconds))


@contextmanager
def _two(server: EtcdServer, flavour: Flavour, connections: int) -> Iterator[Two]:
    with (
        Proxy(server) as first,
        Proxy(server) as second,
        peers(f"{first.url},127.0.0.1:{second.port}", "unused") as peer,
    ):
        one = peer(flavour)
        wire = Wire[Reply](one.store.endpoint, connections, one.backend.runtime)
        two = Two(first, second, one, wire)
        assert two.run().status == OK
        first.reset_counts()
        yield two
        one.run(wire.close())


def _during(two: Two, then: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs ``then`` while a request to the first host waits for its reply, until that is there."""
    two.first.hold_replies()

    def sent() -> bool:
        return two.first.counts.bytes_to_server > 0

    async def run() -> None:
        slow = asyncio.create_task(two.ask())
        await asyncio.to_thread(wait_until, "the request is sent", sent, SOON)
        await then()
        two.first.let_replies()
        assert (await slow).status == OK

    if two.one.backend.runtime.blocking:
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(lambda: run_now(two.ask()))
            wait_until("the request is sent", sent, SOON)
            run_now(then())
            two.first.let_replies()
            assert slow.result(SOON).status == OK
        return
    two.one.run(asyncio.wait_for(run(), SOON))


@every_flavour
def test_a_connection_to_a_host_that_was_left_is_not_kept(
    server: EtcdServer, flavour: Flavour
) -> None:
    """Its request was under way when requests left the host."""
    with _two(server, flavour, 4) as two:

        async def leave() -> None:
            two.wire.hosts.failed(0)
            assert (await two.ask()).status == OK
            assert (two.first.open_connections, two.second.open_connections) == (1, 1)

        _during(two, leave)
        wait_until("it is closed", lambda: two.first.open_connections == 0, SOON)
        assert two.run().status == OK
        assert two.current == 1


@every_flavour
def test_a_node_without_a_leader_is_left(server: EtcdServer, flavour: Flavour) -> None:
    asked: list[int] = []

    def reply(number: int) -> bytes:
        asked.append(number)
        return grpc_reply(number, b"", 14, "etcdserver: no leader")

    with (
        fake_server(answering(reply)) as port,
        peers(f"etcd://127.0.0.1:{port},{server.host}:{server.port}", "unused") as peer,
    ):
        one = peer(flavour)
        with pytest.raises(BackendUnavailable, match="no leader"):
            one.run(one.backend.look("name"))
        for _ in range(3):
            one.run(one.backend.look("name"))
        assert (len(asked), one.store.hosts.current) == (1, 1)


@every_flavour
def test_a_short_deadline_is_no_fault_of_the_host(server: EtcdServer, flavour: Flavour) -> None:
    with _two(server, flavour, 4) as two:
        two.first.hold_replies()
        with pytest.raises(BackendUnavailable):
            two.run(SHORT)
        assert two.current == 0
        two.first.let_replies()
        assert two.run().status == OK


@every_flavour
def test_a_busy_pool_is_no_fault_of_the_host(server: EtcdServer, flavour: Flavour) -> None:
    """The only connection is in use until the deadline of the second request."""
    with _two(server, flavour, 1) as two:

        async def queue() -> None:
            with pytest.raises(BackendUnavailable):
                await two.ask(SHORT)

        _during(two, queue)
        assert two.current == 0


@every_flavour
def test_a_host_that_answers_nothing_is_left_by_short_requests(
    server: EtcdServer, flavour: Flavour
) -> None:
    """No request waits for long, but none of them is answered."""
    with _two(server, flavour, 4) as two:
        two.first.stall()
        begun = time.monotonic()
        while two.current == 0:
            assert time.monotonic() - begun < SOON
            with pytest.raises(BackendUnavailable):
                two.run(SHORT)
        assert two.run().status == OK
        two.first.resume()


@every_flavour
def test_a_host_that_breaks_a_connection_is_left(server: EtcdServer, flavour: Flavour) -> None:
    with _two(server, flavour, 4) as two:
        dropped = two.first.drop_next_reply()
        with pytest.raises(BackendUnavailable):
            two.run()
        assert dropped.wait(SOON)
        assert two.current == 1
        assert two.run().status == OK
