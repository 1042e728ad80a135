"""Fixtures that the tests of several files use."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from kazoo.client import KazooClient

from holdfast.core import acquire
from holdfast.stores.zookeeper.client.packets import Request
from holdfast.stores.zookeeper.session import ZooKeeperSession
from servers.registry import Servers
from stores.zookeeper.helpers import QuickServer


@pytest.fixture
def namespace() -> str:
    """A namespace for one test, on a server that many tests share."""
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def no_recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the periodic re-check: only a wake-up ends a wait."""
    monkeypatch.setattr(acquire, "RECHECK_SECONDS", (300.0, 400.0))


@pytest.fixture
def kazoo(servers: Servers) -> Iterator[KazooClient]:
    """A plain kazoo client, to read the stored nodes."""
    server = servers.of(QuickServer)
    client = KazooClient(f"{server.host}:{server.port}")
    client.start()
    yield client
    client.stop()
    client.close()


@pytest.fixture
def round_trips(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Every round trip to a ZooKeeper server, as the kinds of its requests."""
    seen: list[list[str]] = []
    start, request = ZooKeeperSession.start, ZooKeeperSession.request

    def started(session: ZooKeeperSession, completion: Any, *requests: Request) -> None:
        seen.append([type(each).__name__ for each in requests])
        start(session, completion, *requests)

    def requested(session: ZooKeeperSession, seconds: float, requests: Sequence[Request]) -> None:
        seen.append([type(each).__name__ for each in requests])
        request(session, seconds, requests)

    monkeypatch.setattr(ZooKeeperSession, "start", started)
    monkeypatch.setattr(ZooKeeperSession, "request", requested)
    return seen
