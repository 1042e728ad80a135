"""Fixtures that the tests of the etcd store share.

A test module takes them over by name: ``server, peer = helpers.server, helpers.peer``.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator

import pytest

from holdfast.stores.etcd.messages import data, integer
from servers.etcd import EtcdServer
from servers.registry import Servers
from stores.http_peer import Peer, peers

__all__ = ["encoded", "peer", "server", "watch_message"]


@pytest.fixture
def server(servers: Servers) -> EtcdServer:
    """The server that most tests share, each with a namespace of its own."""
    return servers.of(EtcdServer)


@pytest.fixture
def peer(server: EtcdServer, namespace: str) -> Iterator[Callable[..., Peer]]:
    """Returns a function that makes peers on the server."""
    with peers(server.url, namespace) as make:
        yield make


def encoded(key: str) -> str:
    """A key as etcd's JSON gateway takes it, which the tests use beside the client."""
    return b64encode(key.encode()).decode()


def watch_message(
    number: int, *, revision: int = 7, created: bool = False, canceled: bool = False
) -> bytes:
    """What etcd sends about a watch, without events."""
    header = data(1, integer(3, revision))
    return header + integer(2, number) + integer(3, created) + integer(4, canceled)
