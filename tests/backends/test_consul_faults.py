"""Three Consul servers, and what happens to them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import closing

import pytest

import holdfast
from backends.zookeeper_bench import Believer
from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.testing import Flavour
from holdfast.testing.processes import Process
from servers.consul import ConsulServer, ConsulTrio
from servers.missing import ServerMissing, required

pytestmark = pytest.mark.faults

TTL = 2.0
ELECTION = 5.0
BOUND = 2 * TTL + ELECTION + 4
"""After what a name must be free again, whatever happened to its holder."""


@pytest.fixture(scope="module")
def running() -> Iterator[ConsulTrio]:
    trio = ConsulTrio()
    try:
        trio.start()
    except ServerMissing as missing:
        trio.close()
        if required():
            raise
        pytest.skip(str(missing))
    yield trio
    trio.close()


@pytest.fixture
def trio(running: ConsulTrio) -> Iterator[ConsulTrio]:
    yield running
    for node in running.nodes:
        if node.alive and node.paused:
            node.resume()
    running.launch()
    running.wait_ready()


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


def _url(*nodes: ConsulServer) -> str:
    hosts = ",".join(f"{node.host}:{node.port}" for node in nodes)
    return f"consul://{hosts}?session_ttl_min=1"


def _others(trio: ConsulTrio, lonely: ConsulServer) -> str:
    return _url(*(node for node in trio.nodes if node is not lonely))


def _next_token(url: str, namespace: str, seconds: float) -> tuple[int, float]:
    """Takes the lock; the token, and when the block was entered."""
    with (
        holdfast.connect(url, namespace=namespace, ttl=TTL, patience=seconds) as locks,
        locks.lock("name", timeout=seconds) as lease,
    ):
        return lease.token, now()


def test_a_hold_survives_its_leader(trio: ConsulTrio, namespace: str) -> None:
    """A killed leader costs an election, not the hold."""
    with closing(Believer(_url(*trio.nodes), namespace, "name", 20.0)) as believer:
        leader = trio.leader()
        leader.kill()
        with (
            holdfast.connect(_others(trio, leader), namespace=namespace, ttl=TTL) as locks,
            locks.lock("other", timeout=BOUND),
        ):
            assert not locks.lock("name").acquire(timeout=0)
        assert believer.lease is not None
        believer.lease.check(at_least=1.0)
        assert believer.lease.release() is True
    token, _ = _next_token(_others(trio, leader), namespace, BOUND)
    assert token > believer.token


def test_the_leader_stops(trio: ConsulTrio, namespace: str) -> None:
    """A leader that hangs is replaced; whoever holds next, nobody holds at the same time."""
    believer = Believer(_url(*trio.nodes), namespace, "name", TTL)
    with closing(believer):
        leader = trio.leader()
        leader.pause()
        token, entered = _next_token(_others(trio, leader), namespace, BOUND + TTL)
        assert token > believer.token
        assert believer.lost(0.0), "two held at the same time"
        assert believer.believed_until <= entered
        leader.resume()


def test_no_majority_for_three_ttls(trio: ConsulTrio, namespace: str) -> None:
    """Nobody acquires, the holder learns it by its deadline, and work goes on afterwards."""
    url = _url(*trio.nodes)
    with closing(Believer(url, namespace, "name", TTL)) as believer:
        leader = trio.leader()
        stopped = [leader, next(node for node in trio.nodes if node is not leader)]
        for node in stopped:
            node.pause()
        began = now()
        with (
            holdfast.connect(url, namespace=namespace, ttl=TTL, patience=3 * TTL) as locks,
            pytest.raises(BackendUnavailable),
        ):
            locks.lock("free", timeout=None).acquire()
        assert now() - began >= 2 * TTL
        assert believer.lost(0.0)
        assert believer.believed_until <= began + TTL + 0.05
        for node in stopped:
            node.resume()
        token, _ = _next_token(url, namespace, 2 * BOUND)
        assert token > believer.token


def test_a_client_is_stopped_past_its_session(trio: ConsulTrio, namespace: str) -> None:
    """Its first word after it goes on is that the hold is lost."""
    asyncio.run(_stopped_past_its_session(_url(*trio.nodes), namespace))


async def _stopped_past_its_session(url: str, namespace: str) -> None:
    process = Process(url, Flavour.BLOCKING, namespace=namespace, ttl=TTL)
    try:
        token = await process.ask("acquire", name="name")
        process.stop()
        later, _ = await asyncio.to_thread(_next_token, url, namespace, BOUND)
        assert later > token
        process.go_on()
        state = await process.ask("state", name="name")
        assert (state["held"], state["lost"]) == (False, True)
        assert await process.ask("release", name="name") is False
    finally:
        process.go_on()
        process.close()
