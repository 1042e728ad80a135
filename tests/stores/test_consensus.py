"""What etcd, Consul and ZooKeeper have in common: deadlines, crowds, certificates."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import NamedTuple

import pytest

import holdfast
from holdfast.claim import Busy, Grant
from holdfast.core.contract import Backend, Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.testing import Flavour
from holdfast.testing.stalls import Stalls
from holdfast.url import open_store
from servers.consul import ConsulServer
from servers.etcd import EtcdServer
from servers.process import Server
from servers.proxy import Proxy
from servers.registry import Servers
from stores.claims import claim_of
from stores.mutual_tls import MutualConsul, MutualEtcd, mutual_url
from stores.signals import signals
from stores.waiting import waited_for
from stores.zookeeper.helpers import QuickServer

TIMEOUT = 1.0
REQUEST = 4.0
"""Less than a request may take that knows no deadline (five seconds), and much more than ours."""
SOON = 60.0
CROWD = 1000
CHAIN = 6

KINDS: dict[str, type[Server]] = {
    "etcd": EtcdServer,
    "consul": ConsulServer,
    "zookeeper": QuickServer,
}


class Place(NamedTuple):
    """A server, a proxy before it, and a namespace of one's own."""

    url: str
    proxy: Proxy
    proxied: str
    namespace: str


@pytest.fixture(params=list(KINDS))
def place(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Place]:
    server = servers.of(KINDS[request.param])
    suffix = "?session_ttl_min=1" if request.param == "consul" else ""
    with Proxy(server) as proxy:
        yield Place(server.url + suffix, proxy, proxy.url + suffix, f"t{secrets.token_hex(6)}")
        proxy.heal()


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("known", [False, True], ids=["first", "later"])
def test_a_store_that_hangs_is_given_up_in_time(
    place: Place, flavour: Flavour, known: bool
) -> None:
    """Who waits a second for a lock does not wait five for a store, whether it is asked for a
    session or for the lock."""
    if flavour is Flavour.BLOCKING:
        _give_up(place, known)
    else:
        asyncio.run(_give_up_async(place, known))


@pytest.mark.parametrize("known", [False, True], ids=["first", "later"])
def test_signals_do_not_stretch_that(place: Place, known: bool) -> None:
    """A system call that a signal interrupts begins anew; the time that it may take does not."""
    with signals():
        _give_up(place, known)


def _give_up(place: Place, known: bool) -> None:
    with holdfast.connect(place.proxied, namespace=place.namespace, ttl=20) as locks:
        if known:
            with locks.lock("name"):
                pass
        place.proxy.stall()
        began = now()
        with Stalls() as stalls, pytest.raises(BackendUnavailable):
            locks.lock("name").acquire(timeout=TIMEOUT)
        assert now() - began - stalls.seconds < REQUEST
        place.proxy.heal()


async def _give_up_async(place: Place, known: bool) -> None:
    async with holdfast.connect_async(place.proxied, namespace=place.namespace, ttl=20) as locks:
        if known:
            async with locks.lock("name"):
                pass
        place.proxy.stall()
        began = now()
        with Stalls() as stalls, pytest.raises(BackendUnavailable):
            await locks.lock("name").acquire(timeout=TIMEOUT)
        assert now() - began - stalls.seconds < REQUEST
        place.proxy.heal()


@pytest.mark.faults
def test_a_thousand_tasks_wait_with_three_connections(place: Place) -> None:
    """However many wait for a lock, its store sees three connections at most: for requests, for
    wake-ups, and the renewer's."""
    asyncio.run(_crowd(place))


async def _crowd(place: Place) -> None:
    async with (
        holdfast.connect_async(place.url, namespace=place.namespace) as ours,
        holdfast.connect_async(place.proxied, namespace=place.namespace) as theirs,
    ):
        held = await ours.lock("name").acquire()
        assert held
        served: list[int] = []

        async def use(number: int) -> None:
            async with theirs.lock("name"):
                served.append(number)

        tasks = [asyncio.create_task(use(number)) for number in range(CROWD)]
        deadline = now() + SOON
        while (await _behind(ours)) < CROWD - 1:  # told by the renewer, with its next refresh
            assert now() < deadline
            await asyncio.sleep(0.05)
        assert place.proxy.open_connections <= 3
        assert await held.release()
        await asyncio.gather(*tasks)
    assert served == list(range(CROWD))


async def _behind(locks: holdfast.AsyncLocks) -> int:
    waiters = (await locks.inspect("name")).waiters
    return waiters[0].behind if waiters else 0


def test_a_release_wakes_one(place: Place) -> None:
    """Each waits for the one in front of it: of many waits, every release ends one, in order."""
    peers = [_backend(place) for _ in range(CHAIN + 1)]
    claims = [claim_of() for _ in peers]
    answers = [run_now(p.attempt(c, join=True)) for p, c in zip(peers, claims, strict=True)]
    grant, *busies = answers
    assert isinstance(grant, Grant)
    returned: Queue[int] = Queue()

    def wait(number: int, busy: Grant | Busy) -> None:
        assert isinstance(busy, Busy)
        run_now(peers[number].wait(claims[number], busy, now() + SOON))
        returned.put(number)

    with ThreadPoolExecutor(CHAIN) as pool:
        waits = [pool.submit(wait, number, busy) for number, busy in enumerate(busies, 1)]
        for number in range(1, CHAIN + 1):
            assert returned.empty(), "somebody was woken in vain"
            assert run_now(peers[number - 1].release(grant)) is True
            assert returned.get(timeout=SOON / 2) == number
            grant = run_now(peers[number].attempt(claims[number], join=True))
            assert isinstance(grant, Grant)
        for done in waits:
            done.result()
    assert run_now(peers[-1].release(grant)) is True
    for peer in peers:
        run_now(peer.close())


def _backend(place: Place) -> Backend:
    return open_store(place.url, Settings(namespace=place.namespace)).backend(BlockingRuntime())


def test_a_ttl_below_the_floor_is_refused() -> None:
    """Where the floor is known without asking, when the lock is made, and by its name."""
    for url, floor in (("etcd://localhost", "2 s at least"), ("consul://localhost", "10 s at")):
        with holdfast.connect(url) as locks, pytest.raises(ValueError, match=floor):
            locks.lock("name", ttl=1)


@pytest.mark.usefixtures("no_recheck")
@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("kind", [MutualEtcd, MutualConsul])
def test_client_certificates(
    servers: Servers, kind: type[MutualEtcd | MutualConsul], flavour: Flavour
) -> None:
    """A server that asks for one gets it, for requests and for wake-ups; without one there is no
    way in."""
    server: MutualEtcd | MutualConsul = servers.of(kind)  # type: ignore[assignment]
    namespace = f"t{secrets.token_hex(6)}"
    with waited_for(mutual_url(server), namespace, flavour):
        pass
    with (
        holdfast.connect(server.url, namespace=namespace, patience=0.5) as locks,
        pytest.raises(BackendUnavailable),
    ):
        locks.lock("name").acquire(blocking=False)
