"""Renewing on ZooKeeper: many holds in one round trip, and what a heartbeat proves."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kazoo.client import KazooClient

from holdfast.claim import Grant
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.zookeeper import backend as zookeeper
from holdfast.stores.zookeeper.client.packets import Request
from holdfast.stores.zookeeper.session import NEVER, ZooKeeperOptions, ZooKeeperSession
from holdfast.url import open_store
from stores.claims import claim_of
from stores.zookeeper import helpers
from stores.zookeeper.helpers import QuickServer

server = helpers.server


def _held(backend: Any, names: Iterable[str]) -> list[Grant]:
    def hold(name: str) -> Grant:
        grant = run_now(backend.attempt(claim_of(name, ttl=50.0), join=True))
        assert isinstance(grant, Grant)
        return grant

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(hold, names))


def test_holds_are_renewed_in_one_round_trip(
    server: QuickServer,
    namespace: str,
    kazoo: KazooClient,
    round_trips: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One write proves many holds; only after a failed write its holds are read one by one."""
    monkeypatch.setattr(zookeeper, "BATCH", 10)
    backend = open_store(server.url, Settings(namespace=namespace)).backend(BlockingRuntime())
    grants = _held(backend, map(str, range(25)))
    round_trips.clear()
    renewal = run_now(backend.renew(grants, [], until=now() + 20))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert round_trips == [["Checks"] * 3]
    broken = grants[17]
    kazoo.delete(broken.ref[2])
    round_trips.clear()
    renewal = run_now(backend.renew(grants, [], until=now() + 20))
    assert (set(renewal.lost), renewal.unknown) == ({broken.claim.owner}, {})
    assert round_trips == [["Checks"] * 3, ["Exists"] * 10]
    run_now(backend.close())


def test_a_thousand_holds_are_one_request(
    server: QuickServer, namespace: str, round_trips: list[list[str]]
) -> None:
    """Besides the heartbeats of their session, whose number does not depend on the holds."""
    backend = open_store(server.url, Settings(namespace=namespace)).backend(BlockingRuntime())
    grants = _held(backend, map(str, range(1000)))
    round_trips.clear()
    renewal = run_now(backend.renew(grants, [], until=now() + 20))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert round_trips == [["Checks"]]
    run_now(backend.close())


def test_holds_of_long_names_are_renewed(server: QuickServer, namespace: str) -> None:
    """Servers close a connection that sends a megabyte at once."""
    settings = Settings(namespace=namespace.ljust(500, "\x7f"))
    backend = open_store(server.url, settings).backend(BlockingRuntime())
    grants = _held(backend, (f"{n:04}".ljust(508, "\x7f") for n in range(400)))
    assert sum(len(grant.ref[2]) for grant in grants) > 2**20
    renewal = run_now(backend.renew(grants, [], until=now() + 20))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    run_now(backend.close())


def test_holds_are_renewed_while_others_are_released(
    server: QuickServer, namespace: str, kazoo: KazooClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if another hold is released at every request."""
    backend = open_store(server.url, Settings(namespace=namespace)).backend(BlockingRuntime())
    grants = _held(backend, map(str, range(20)))
    going, start = grants[10:], ZooKeeperSession.start
    gone: list[Grant] = []

    def lose_one(session: ZooKeeperSession, completion: Any, *requests: Request) -> None:
        gone.append(going.pop())
        kazoo.delete(gone[-1].ref[2])
        start(session, completion, *requests)

    monkeypatch.setattr(ZooKeeperSession, "start", lose_one)
    renewal = run_now(backend.renew(grants, [], until=now() + 20))
    monkeypatch.undo()
    assert gone
    assert set(renewal.lost) == {grant.claim.owner for grant in gone}
    assert renewal.unknown == {}
    run_now(backend.close())


def test_a_heartbeat_counts_once_a_later_write_was_answered() -> None:
    """The leader knows of it up to half a tick later; the session timeout includes that."""
    options = ZooKeeperOptions((("host", 1),), "zookeeper://host:1", 5.0, tick=1.0)
    session = ZooKeeperSession(options, 10.0, None, lambda *_: None)
    wanted = session.negotiate(2.0)
    assert wanted >= 10.0 + session.lag + 1.0
    session.timeout, session.id = wanted, 7
    reserve = wanted - 10.0
    session._connected_since = 100.0
    assert session.since(100.5, 7) == 100.5  # the leader has confirmed the connection
    assert session.since(130.0, 7) == pytest.approx(100.0 + reserve)
    session._heartbeats.append(129.5)
    assert session.since(130.0, 7) == pytest.approx(100.0 + reserve)  # perhaps not reported yet
    assert session.since(130.5, 7) == 130.5
    assert session.proven_since(7) == 130.5
    assert session.since(131.0, 8) == session.proven_since(8) == NEVER
