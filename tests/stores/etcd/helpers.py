"""Fixtures that the tests of the etcd store share.

A test module takes them over by name: ``server, peer = helpers.server, helpers.peer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from servers.etcd import EtcdServer
from servers.registry import Servers
from stores.http_peer import Peer, peers

__all__ = ["peer", "server"]


@pytest.fixture
def server(servers: Servers) -> EtcdServer:
    """The server that most tests share, each with a namespace of its own."""
    return servers.of(EtcdServer)


@pytest.fixture
def peer(server: EtcdServer, namespace: str) -> Iterator[Callable[..., Peer]]:
    """Returns a function that makes peers on the server."""
    with peers(server.url, namespace) as make:
        yield make
