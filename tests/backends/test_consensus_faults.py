"""Three servers of etcd, Consul or ZooKeeper, and what happens to them, whichever they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest

import holdfast
from backends.links import LinkedConsulTrio, LinkedEtcdTrio
from backends.recovery import CALM, SOON, Believer, Tell, next_token, recovers
from backends.zookeeper_bench import TICK_SECONDS, LinkedZooKeeperTrio
from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.testing import Flavour
from holdfast.testing.processes import Process
from servers.proxy import Proxy
from servers.registry import Servers

pytestmark = pytest.mark.faults

ETCD_CHECK = 0.5
"""How often etcd looks for leases that have ended."""
ZOOKEEPER_SESSION = 1.1 * 2.0 + 2 * TICK_SECONDS
"""After what a session ends, as the servers round it. A new leader counts it anew."""


class Kind(NamedTuple):
    """A store's three servers, and what is documented of them."""

    trio: Any
    ttl: float
    ended: float
    """A hold whose holder is gone has ended after so long, where one leader goes on."""
    elected: float
    """The same across an election."""
    longest: float = 60.0
    """A ttl that no election outlasts."""
    grant: bytes = b""
    """What the request for a lock has in it."""


KINDS = {
    "etcd": Kind(LinkedEtcdTrio, 3.0, 3.0 + ETCD_CHECK, 6.0 + ETCD_CHECK, grant=b"/v3/kv/txn"),
    "consul": Kind(LinkedConsulTrio, 2.0, 4.0, 4.0, grant=b"/locks/name/"),
    "zookeeper": Kind(
        LinkedZooKeeperTrio, 2.0, ZOOKEEPER_SESSION, 2 * ZOOKEEPER_SESSION, longest=30.0
    ),
}
every_kind = pytest.mark.parametrize("store", list(KINDS))


@pytest.fixture
def kind(store: str) -> Kind:
    return KINDS[store]


@pytest.fixture
def trio(kind: Kind, servers: Servers) -> Iterator[Any]:
    running = servers.of(kind.trio)
    yield running
    running.mend()


def _nothing_is_left(url: str, namespace: str) -> None:
    with holdfast.connect(url, namespace=namespace) as locks:
        standing = locks.inspect("name")
        assert (standing.holders, standing.waiters) == ((), ())


@every_kind
def test_a_hold_survives_its_leader(trio: Any, kind: Kind, namespace: str) -> None:
    """A killed leader costs an election, not the hold."""
    with closing(Believer(trio.url, namespace, "name", kind.longest)) as believer:
        trio.leader().kill()
        with (
            holdfast.connect(trio.url, namespace=namespace, ttl=CALM, patience=SOON) as locks,
            locks.lock("other", timeout=SOON),  # there is a leader again
        ):
            assert not locks.lock("name").acquire(timeout=0)
        assert believer.lease is not None
        believer.lease.check(at_least=1.0)
        assert believer.lease.release() is True
    token, _ = next_token(trio.url, namespace)
    assert token > believer.token


@pytest.mark.parametrize("store", ["etcd", "zookeeper"])
def test_the_leader_stops(trio: Any, kind: Kind, namespace: str) -> None:
    """A leader that hangs is replaced; whoever holds next, nobody holds at the same time."""
    with closing(Believer(trio.url, namespace, "name", kind.ttl)) as believer:
        leader = trio.leader()
        leader.pause()
        url = trio.others(leader)
        with (
            holdfast.connect(url, namespace=namespace, ttl=CALM, patience=SOON) as locks,
            locks.lock("other", timeout=SOON) as lease,
        ):
            assert lease.token > believer.token
        leader.resume()
        if not believer.lost(0.0):
            assert believer.lease is not None
            assert believer.lease.release() is True
        token, entered = next_token(trio.url, namespace)
        assert token > believer.token
        assert believer.believed_until <= entered


@pytest.mark.parametrize("store", ["consul"])
def test_the_leader_stops_and_the_hold_ends(
    trio: Any, kind: Kind, namespace: str, record_property: Tell
) -> None:
    """While it hangs, another server lets the next one in, after the last one knows."""
    with closing(Believer(trio.url, namespace, "name", kind.ttl)) as believer:
        leader = trio.leader()
        leader.pause()
        believer.loses(trio.others(leader), namespace, kind.elected, record_property)
        leader.resume()


@pytest.mark.parametrize("role", ["leader", "follower"])
@pytest.mark.parametrize("store", ["etcd", "consul"])
def test_a_minority_is_cut_off_with_its_client(
    trio: Any, kind: Kind, namespace: str, role: str, record_property: Tell
) -> None:
    """An old leader goes on answering keep-alives for a while; that proves nothing: its client
    stops before anybody else begins."""
    lonely = trio.leader() if role == "leader" else trio.follower()
    with closing(Believer(trio.url_of(lonely), namespace, "name", kind.ttl)) as believer:
        trio.isolate(lonely)
        url = trio.others(lonely)
        believer.loses(url, namespace, kind.elected, record_property)
        _nothing_is_left(url, namespace)
    trio.mend()
    _nothing_is_left(trio.url, namespace)


@pytest.mark.parametrize("mode", ["lock", "semaphore"])
@pytest.mark.parametrize("store", ["etcd", "consul"])
def test_the_reply_of_the_grant_is_lost(trio: Any, kind: Kind, namespace: str, mode: str) -> None:
    """It is found again by its owner: one hold, and nothing left of it afterwards."""
    with (
        Proxy(trio.nodes[0]) as proxy,
        holdfast.connect(proxy.url + trio.suffix, namespace=namespace, ttl=CALM) as locks,
        holdfast.connect(trio.url, namespace=namespace, ttl=CALM) as others,
    ):
        lock = locks.lock("name") if mode == "lock" else locks.semaphore("name", 2)
        with lock:
            pass
        dropped = proxy.drop_next_reply(matching=kind.grant)
        with lock as lease:
            assert dropped.is_set()
            standing = others.inspect("name")
            assert [holder.token for holder in standing.holders] == [lease.token]
            assert standing.waiters == ()
    _nothing_is_left(trio.url, namespace)


@every_kind
def test_no_majority_for_three_ttls(
    trio: Any, kind: Kind, namespace: str, record_property: Tell
) -> None:
    """Nobody acquires, the holder learns it by its deadline, and work goes on afterwards."""
    ttl = kind.ttl
    with closing(Believer(trio.url, namespace, "name", ttl)) as believer:
        kept = trio.follower()
        stopped = [node for node in trio.nodes if node is not kept]
        for node in stopped:
            node.pause()
        began = now()
        with (
            holdfast.connect(trio.url, namespace=namespace, ttl=ttl, patience=3 * ttl) as locks,
            pytest.raises(BackendUnavailable),
        ):
            locks.lock("free", timeout=None).acquire()
        assert now() - began >= 2 * ttl
        assert believer.lost(SOON)
        assert believer.believed_until <= began + ttl + 0.05
        for node in stopped:
            node.resume()
        token, _ = recovers(trio.url, namespace, kind.elected, record_property)
        assert token > believer.token


@every_kind
def test_a_client_is_stopped_past_its_session(
    trio: Any, kind: Kind, namespace: str, record_property: Tell
) -> None:
    """Its first word after it goes on is that the hold is lost."""
    asyncio.run(_stopped_past_its_session(trio.url, kind, namespace, record_property))


async def _stopped_past_its_session(url: str, kind: Kind, namespace: str, tell: Tell) -> None:
    process = Process(url, Flavour.BLOCKING, namespace=namespace, ttl=kind.ttl)
    try:
        token = await process.ask("acquire", name="name")
        process.stop()
        later, _ = await asyncio.to_thread(recovers, url, namespace, kind.ended, tell)
        assert later > token
        process.go_on()
        state = await process.ask("state", name="name")
        assert (state["held"], state["lost"]) == (False, True)
        assert await process.ask("release", name="name") is False
    finally:
        process.go_on()
        process.close()
