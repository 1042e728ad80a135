"""Three Consul servers, and what happens to them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import closing

import pytest

import holdfast
from backends.consensus_bench import LinkedConsulTrio
from backends.recovery import Recovery, Tell
from backends.zookeeper_bench import Believer
from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.testing import Flavour
from holdfast.testing.processes import Process
from servers.missing import ServerMissing, required
from servers.proxy import Proxy

pytestmark = pytest.mark.faults

TTL = 2.0
CALM = 20.0
"""The ttl of those who are not to lose what they hold."""
SOON = 60.0
"""Far more than two ttls and an election, on a machine that is busy: what counts is the order."""
LOCK_DELAY = 4


@pytest.fixture(scope="module")
def running() -> Iterator[LinkedConsulTrio]:
    trio = LinkedConsulTrio()
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
def trio(running: LinkedConsulTrio) -> Iterator[LinkedConsulTrio]:
    yield running
    running.mend()


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


def _next_token(url: str, namespace: str, seconds: float) -> tuple[int, float]:
    """Takes the lock; the token, and when the block was entered."""
    with (
        holdfast.connect(url, namespace=namespace, ttl=CALM, patience=seconds) as locks,
        locks.lock("name", timeout=seconds) as lease,
    ):
        return lease.token, now()


def _recovers(url: str, namespace: str, bound: float, tell: Tell) -> tuple[int, float]:
    """As above, within what is documented."""
    with Recovery(url, namespace) as recovery:
        found = _next_token(url, namespace, SOON)
        recovery.within(bound, tell)
    return found


def test_a_hold_survives_its_leader(trio: LinkedConsulTrio, namespace: str) -> None:
    """A killed leader costs an election, not the hold."""
    with closing(Believer(trio.url(), namespace, "name", 60.0)) as believer:
        leader = trio.find(leads=True)
        leader.kill()
        with (
            holdfast.connect(trio.others(leader), namespace=namespace, ttl=CALM) as locks,
            locks.lock("other", timeout=SOON),
        ):
            assert not locks.lock("name").acquire(timeout=0)
        assert believer.lease is not None
        believer.lease.check(at_least=1.0)
        assert believer.lease.release() is True
    token, _ = _next_token(trio.others(leader), namespace, SOON)
    assert token > believer.token


def test_the_leader_stops(trio: LinkedConsulTrio, namespace: str, record_property: Tell) -> None:
    """A leader that hangs is replaced; whoever holds next, nobody holds at the same time."""
    believer = Believer(trio.url(), namespace, "name", TTL)
    with closing(believer):
        leader = trio.find(leads=True)
        leader.pause()
        url = trio.others(leader)
        token, entered = _recovers(url, namespace, 2 * TTL, record_property)
        assert token > believer.token
        assert believer.lost(SOON), "two held at the same time"
        assert believer.believed_until <= entered
        leader.resume()


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
def test_a_minority_is_cut_off_with_its_client(
    trio: LinkedConsulTrio, namespace: str, leads: bool, record_property: Tell
) -> None:
    """A server that is cut off proves nothing: its client stops before anybody else begins."""
    lonely = trio.find(leads=leads)
    with closing(Believer(trio.url(lonely), namespace, "name", TTL)) as believer:
        trio.isolate(lonely)
        url = trio.others(lonely)
        token, entered = _recovers(url, namespace, 2 * TTL, record_property)
        assert token > believer.token
        assert believer.lost(SOON), "two held at the same time"
        assert believer.believed_until <= entered
    trio.mend()
    _nothing_is_left(trio, namespace)


def _nothing_is_left(trio: LinkedConsulTrio, namespace: str) -> None:
    with holdfast.connect(trio.url(), namespace=namespace) as locks:
        standing = locks.inspect("name")
        assert (standing.holders, standing.waiters) == ((), ())


@pytest.mark.parametrize("mode", ["lock", "semaphore"])
def test_the_reply_of_the_grant_is_lost(trio: LinkedConsulTrio, namespace: str, mode: str) -> None:
    """It is found again by its owner: one hold, and nothing left of it afterwards."""
    url = "?session_ttl_min=1"
    with (
        Proxy(trio.nodes[0]) as proxy,
        holdfast.connect(proxy.url + url, namespace=namespace, ttl=CALM) as locks,
        holdfast.connect(trio.url(), namespace=namespace, ttl=TTL) as others,
    ):
        lock = locks.lock("name") if mode == "lock" else locks.semaphore("name", 2)
        with lock:
            pass
        dropped = proxy.drop_next_reply(matching=b"/locks/name/")
        with lock as lease:
            assert dropped.is_set()
            standing = others.inspect("name")
            assert [holder.token for holder in standing.holders] == [lease.token]
            assert standing.waiters == ()
    _nothing_is_left(trio, namespace)


def test_a_session_is_destroyed_from_outside(
    trio: LinkedConsulTrio, namespace: str, record_property: Tell
) -> None:
    """With a lock-delay the next one is let in only after the last one knows: nobody works at
    the same time as another."""
    url = f"{trio.url()}&lock_delay={LOCK_DELAY}"
    with closing(Believer(url, namespace, "name", TTL)) as believer:
        for session in trio.nodes[0].ask("/v1/session/list"):
            if session["Name"].endswith(namespace):
                trio.nodes[0].ask(f"/v1/session/destroy/{session['ID']}", "", method="PUT")
        token, entered = _recovers(trio.url(), namespace, LOCK_DELAY, record_property)
        assert token > believer.token
        assert believer.lost(SOON), "two held at the same time"
        assert believer.believed_until <= entered
        assert "session" in believer.reason
    _nothing_is_left(trio, namespace)


def test_no_majority_for_three_ttls(
    trio: LinkedConsulTrio, namespace: str, record_property: Tell
) -> None:
    """Nobody acquires, the holder learns it by its deadline, and work goes on afterwards."""
    url = trio.url()
    with closing(Believer(url, namespace, "name", TTL)) as believer:
        leader = trio.find(leads=True)
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
        assert believer.lost(SOON)
        assert believer.believed_until <= began + TTL + 0.05
        for node in stopped:
            node.resume()
        token, _ = _recovers(url, namespace, 2 * TTL, record_property)
        assert token > believer.token


def test_a_client_is_stopped_past_its_session(
    trio: LinkedConsulTrio, namespace: str, record_property: Tell
) -> None:
    """Its first word after it goes on is that the hold is lost."""
    asyncio.run(_stopped_past_its_session(trio.url(), namespace, record_property))


async def _stopped_past_its_session(url: str, namespace: str, tell: Tell) -> None:
    process = Process(url, Flavour.BLOCKING, namespace=namespace, ttl=TTL)
    try:
        token = await process.ask("acquire", name="name")
        process.stop()
        later, _ = await asyncio.to_thread(_recovers, url, namespace, 2 * TTL, tell)
        assert later > token
        process.go_on()
        state = await process.ask("state", name="name")
        assert (state["held"], state["lost"]) == (False, True)
        assert await process.ask("release", name="name") is False
    finally:
        process.go_on()
        process.close()
