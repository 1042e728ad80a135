"""Which host of Consul requests go to: a refusal of the request itself is no fault of the host."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator

import pytest

from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.http import Reply
from holdfast.io.runtime_aio import AsyncioRuntime
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores._consensus.hosts import Hosts, Wire
from holdfast.stores.consul.agent import AgentEndpoint
from holdfast.testing import Flavour
from stores.fake_server import fake_server, http_reply
from stores.http_peer import Peer, peers

SESSION = "01234567-89ab-cdef-0123-456789abcdef"


class NewConsul:
    """A datacenter without sessions so far: the node of sessions is not registered."""

    def __init__(self) -> None:
        self.refusal = b"rpc error making call: Missing node registration"
        self.registered = False

    def __call__(self, connection: socket.socket) -> None:
        while data := connection.recv(65_536):
            connection.sendall(self.reply(data))

    def reply(self, data: bytes) -> bytes:
        if b"/v1/catalog/register" in data:
            self.registered = True
            return http_reply(b"true")
        if not self.registered:
            return http_reply(self.refusal, "500 Internal Server Error")
        return http_reply(b'{"ID": "%b"}' % SESSION.encode())


class Silent:
    """Accepts connections and answers nothing."""

    def __init__(self) -> None:
        self.connections = 0

    def __call__(self, connection: socket.socket) -> None:
        self.connections += 1
        while connection.recv(65_536):
            pass


@pytest.fixture
def consul() -> NewConsul:
    return NewConsul()


@pytest.fixture
def silent() -> Silent:
    return Silent()


@pytest.fixture
def one(request: pytest.FixtureRequest, consul: NewConsul, silent: Silent) -> Iterator[Peer]:
    with (
        fake_server(consul) as first,
        fake_server(silent) as second,
        peers(f"consul://127.0.0.1:{first},127.0.0.1:{second}", "unused") as peer,
    ):
        yield peer(request.param)


every_peer = pytest.mark.parametrize("one", list(Flavour), indirect=True)


@every_peer
def test_the_first_session_of_a_datacenter_is_made_on_one_host(one: Peer, silent: Silent) -> None:
    """Else its node would be registered on the next host, which may answer nothing: for ever."""
    session = one.run(one.backend.renewer.session(10.0))
    assert session.id == SESSION
    assert silent.connections == 0


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_silent_host_behind_one_that_refuses_is_left(silent: Silent, flavour: Flavour) -> None:
    """By the first request already, although that began with the host before."""
    with fake_server(silent) as port:
        hosts = Hosts(
            "consul://a,b", (("127.0.0.1", 1), ("127.0.0.1", port)), tls=None, request_seconds=1.0
        )

        async def ask() -> None:
            runtime = BlockingRuntime() if flavour is Flavour.BLOCKING else AsyncioRuntime()
            wire = Wire[Reply](AgentEndpoint(hosts), 1, runtime)
            with pytest.raises(BackendUnavailable, match="no answer in time"):
                await wire.ask(b"GET /")
            await wire.close()

        (run_now if flavour is Flavour.BLOCKING else asyncio.run)(ask())
        assert (silent.connections, hosts.current) == (1, 0)


@every_peer
def test_a_host_that_can_t_serve_is_left(one: Peer, consul: NewConsul) -> None:
    consul.refusal = b"No cluster leader"
    with pytest.raises(BackendUnavailable, match=re.escape("No cluster leader")):
        one.run(one.backend.renewer.session(10.0))
    assert one.store.endpoint.hosts.current == 1
