"""Consul's lock-delay: the keys of an ended session keep other claims out until it is over."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import holdfast
from holdfast.errors import LockTimeout
from holdfast.io.clock import now
from holdfast.testing import Flavour
from holdfast.testing.clients import open_client, run_here
from holdfast.testing.processes import Process
from servers.consul import ConsulServer
from servers.registry import Servers
from stores.waiting import wait_for_waiter

DELAY = 6.0
"""Seconds; longer than a few requests take on a busy machine."""
SOON = 60.0


pytestmark = pytest.mark.faults  # a delay is whole seconds


@pytest.fixture
def server(servers: Servers) -> ConsulServer:
    return servers.of(ConsulServer)


def _url(server: ConsulServer, delay: float = DELAY) -> str:
    return f"{server.url}?session_ttl_min=1&lock_delay={delay:g}"


def _destroy(server: ConsulServer, namespace: str) -> None:
    for session in server.ask("/v1/session/list"):
        if session["Name"].endswith(namespace):
            server.ask(f"/v1/session/destroy/{session['ID']}", "", method="PUT")


def _keys(server: ConsulServer, namespace: str) -> list[str]:
    try:
        return [kv["Key"] for kv in server.ask(f"/v1/kv/{namespace}/?recurse")]
    except OSError:  # 404: no key exists
        return []


def _lock(locks: holdfast.Locks, mode: str, timeout: float) -> Any:
    if mode == "slots":
        return locks.semaphore("name", 2, permits=2, timeout=timeout)
    rwlock = locks.rwlock("name", timeout=timeout)
    return rwlock.read() if mode == "reader" else rwlock.write()


@pytest.mark.parametrize(
    ("first", "second"), [("writer", "reader"), ("reader", "writer"), ("slots", "slots")]
)
def test_the_next_claim_waits_for_the_delay(
    server: ConsulServer, namespace: str, first: str, second: str
) -> None:
    """Also a claim that arrives after the session was destroyed, from a client without a delay."""
    with (
        holdfast.connect(_url(server), namespace=namespace, ttl=50) as ours,
        holdfast.connect(_url(server, 0), namespace=namespace, ttl=50) as theirs,
    ):
        held = _lock(ours, first, SOON).acquire()
        assert held
        (holder,) = theirs.inspect("name").holders
        assert holder.remaining == 50 + DELAY
        destroyed = now()
        _destroy(server, namespace)
        lock = _lock(theirs, second, 0.5)
        with pytest.raises(LockTimeout, match="lock-delay is not over"), lock:
            pass
        (holder,) = theirs.inspect("name").holders
        assert (holder.token, holder.remaining) == (held.token, 0.0)
        with _lock(theirs, second, SOON) as lease:
            assert now() - destroyed >= DELAY
            assert lease.token > held.token
        assert held.release() is False
    assert _keys(server, namespace) == []


def test_a_waiter_enters_after_the_delay(server: ConsulServer, namespace: str) -> None:
    """It sees the end of the session at once, and the end of the delay soon."""
    with (
        holdfast.connect(_url(server), namespace=namespace, ttl=50) as ours,
        holdfast.connect(_url(server, 0), namespace=namespace, ttl=49) as theirs,
    ):
        held = ours.lock("name").acquire()
        assert held
        sessions = [s for s in server.ask("/v1/session/list") if s["Name"].endswith(namespace)]
        entered: list[float] = []

        def wait() -> None:
            with theirs.lock("name", timeout=SOON):
                entered.append(now())

        thread = threading.Thread(target=wait)
        thread.start()
        wait_for_waiter(ours)
        destroyed = now()
        server.ask(f"/v1/session/destroy/{sessions[0]['ID']}", "", method="PUT")
        thread.join()
        assert entered[0] - destroyed >= DELAY
        assert held.release() is False
    assert _keys(server, namespace) == []


def test_a_waiter_whose_session_was_destroyed_joins_again(
    server: ConsulServer, namespace: str
) -> None:
    """The delay is on its own key too; it enters once the delay is over."""
    with (
        holdfast.connect(_url(server, 0), namespace=namespace, ttl=50) as ours,
        holdfast.connect(_url(server), namespace=namespace, ttl=49) as theirs,
    ):
        held = ours.lock("name").acquire()
        assert held
        got = threading.Event()

        def wait() -> None:
            with theirs.lock("name", timeout=SOON):
                got.set()

        thread = threading.Thread(target=wait)
        thread.start()
        wait_for_waiter(ours)
        for session in server.ask("/v1/session/list"):
            if session["Name"].endswith(namespace) and session["TTL"] == "49s":
                server.ask(f"/v1/session/destroy/{session['ID']}", "", method="PUT")
        assert held.release() is True
        assert got.wait(SOON)
        thread.join()
    assert _keys(server, namespace) == []


def test_the_keys_of_a_killed_process_are_swept(server: ConsulServer, namespace: str) -> None:
    """Also if no client uses the same name again: the next session of any client deletes them."""
    asyncio.run(_kill_one(server, namespace))
    deadline = now() + SOON
    while _keys(server, namespace):
        assert now() < deadline, _keys(server, namespace)
        with holdfast.connect(_url(server), namespace=namespace, ttl=1) as locks, locks.lock("b"):
            pass


async def _kill_one(server: ConsulServer, namespace: str) -> None:
    process = Process(_url(server, 1), Flavour.BLOCKING, namespace=namespace, ttl=1)
    try:
        await process.ask("acquire", name="a")
        process.kill()
    finally:
        process.close()
    assert _keys(server, namespace)


def test_a_lock_delay_has_its_limits(server: ConsulServer, namespace: str) -> None:
    """Consul allows a minute at most; ``check()`` says which delay is in force."""
    with pytest.raises(ValueError, match="0 to 60 seconds"):
        holdfast.connect(_url(server, 61))
    with holdfast.connect(_url(server), namespace=namespace) as locks:
        details = "; ".join(finding.detail for finding in locks.check())
    assert "the shortest ttl is 1 s" in details
    assert "one to two ttls" in details
    assert f"the lock-delay is {DELAY:g} s" in details


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("delay", [0, DELAY])
def test_messages_say_how_long_a_dead_holder_blocks(
    server: ConsulServer, namespace: str, flavour: Flavour, delay: float
) -> None:
    """In ``inspect`` and in the error of a timeout: Consul takes up to twice the ttl."""
    asyncio.run(_time_out(_url(server, delay), namespace, flavour, delay))


async def _time_out(url: str, namespace: str, flavour: Flavour, delay: float) -> None:
    async with (
        open_client(url, flavour, run_here, namespace=namespace, ttl=50) as ours,
        open_client(url, flavour, run_here, namespace=namespace, ttl=30) as theirs,
        ours.lock("name"),
    ):
        notice = (await theirs.inspect("name")).notice
        assert "50 to 100 s after its last renewal" in notice
        assert (f"a lock-delay of {delay:g} s" in notice) == bool(delay)
        with pytest.raises(LockTimeout, match=r"held by .* \(if its holder dies, Consul ends it"):
            async with theirs.lock("name", timeout=1):
                pass
        assert (await theirs.inspect("free")).notice == ""
