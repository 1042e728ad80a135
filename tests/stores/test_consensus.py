"""Tests that etcd, Consul and ZooKeeper share: deadlines, many waiters, certificates."""

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
from holdfast.stores._consensus.strict import DamagedAnswer, JsonReader
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
"""Less than the default timeout of a request (five seconds), and much more than ``TIMEOUT``."""
SOON = 60.0
WAITERS = 1000
CHAIN = 6

KINDS: dict[str, type[Server]] = {
    "etcd": EtcdServer,
    "consul": ConsulServer,
    "zookeeper": QuickServer,
}


class ProxiedStore(NamedTuple):
    """A server, a proxy in front of it, and a new namespace."""

    url: str
    proxy: Proxy
    proxied_url: str
    namespace: str


@pytest.fixture(params=list(KINDS))
def proxied_store(request: pytest.FixtureRequest, servers: Servers) -> Iterator[ProxiedStore]:
    server = servers.of(KINDS[request.param])
    suffix = "?session_ttl_min=1" if request.param == "consul" else ""
    with Proxy(server) as proxy:
        yield ProxiedStore(
            server.url + suffix, proxy, proxy.url + suffix, f"t{secrets.token_hex(6)}"
        )
        proxy.heal()


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("known", [False, True], ids=["first", "later"])
def test_an_attempt_ends_in_time_on_a_store_that_does_not_answer(
    proxied_store: ProxiedStore, flavour: Flavour, known: bool
) -> None:
    """A timeout of one second is not exceeded by the request timeout of five, neither for the first
    request (which opens a session) nor for a later one."""
    if flavour is Flavour.BLOCKING:
        _give_up(proxied_store, known)
    else:
        asyncio.run(_give_up_async(proxied_store, known))


@pytest.mark.parametrize("known", [False, True], ids=["first", "later"])
def test_signals_do_not_extend_the_deadline(proxied_store: ProxiedStore, known: bool) -> None:
    """A system call that a signal interrupts is repeated with the remaining time only."""
    with signals():
        _give_up(proxied_store, known)


def _give_up(proxied_store: ProxiedStore, known: bool) -> None:
    with holdfast.connect(
        proxied_store.proxied_url, namespace=proxied_store.namespace, ttl=20
    ) as locks:
        if known:
            with locks.lock("name"):
                pass
        proxied_store.proxy.stall()
        began = now()
        with Stalls() as stalls, pytest.raises(BackendUnavailable):
            locks.lock("name").acquire(timeout=TIMEOUT)
        assert now() - began - stalls.seconds < REQUEST
        proxied_store.proxy.heal()


async def _give_up_async(proxied_store: ProxiedStore, known: bool) -> None:
    async with holdfast.connect_async(
        proxied_store.proxied_url, namespace=proxied_store.namespace, ttl=20
    ) as locks:
        if known:
            async with locks.lock("name"):
                pass
        proxied_store.proxy.stall()
        began = now()
        with Stalls() as stalls, pytest.raises(BackendUnavailable):
            await locks.lock("name").acquire(timeout=TIMEOUT)
        assert now() - began - stalls.seconds < REQUEST
        proxied_store.proxy.heal()


@pytest.mark.faults
def test_a_thousand_tasks_wait_with_three_connections(proxied_store: ProxiedStore) -> None:
    """A client has three connections at most, however many tasks wait: for requests, for wake-ups,
    and for the renewer."""
    asyncio.run(_wait_with_many(proxied_store))


async def _wait_with_many(proxied_store: ProxiedStore) -> None:
    async with (
        holdfast.connect_async(proxied_store.url, namespace=proxied_store.namespace) as ours,
        holdfast.connect_async(
            proxied_store.proxied_url, namespace=proxied_store.namespace
        ) as theirs,
    ):
        held = await ours.lock("name").acquire()
        assert held
        served: list[int] = []

        async def use(number: int) -> None:
            async with theirs.lock("name"):
                served.append(number)

        tasks = [asyncio.create_task(use(number)) for number in range(WAITERS)]
        deadline = now() + SOON
        while (
            await _behind(ours)
        ) < WAITERS - 1:  # the renewer writes the number with its next refresh
            assert now() < deadline
            await asyncio.sleep(0.05)
        assert proxied_store.proxy.open_connections <= 3
        assert await held.release()
        await asyncio.gather(*tasks)
    assert served == list(range(WAITERS))


async def _behind(locks: holdfast.AsyncLocks) -> int:
    waiters = (await locks.inspect("name")).waiters
    return waiters[0].behind if waiters else 0


def test_a_release_wakes_one(proxied_store: ProxiedStore) -> None:
    """Each waiter waits for the one before it: every release ends one wait, in order."""
    peers = [_backend(proxied_store) for _ in range(CHAIN + 1)]
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
            assert returned.empty(), "a waiter was woken too early"
            assert run_now(peers[number - 1].release(grant)) is True
            assert returned.get(timeout=SOON / 2) == number
            grant = run_now(peers[number].attempt(claims[number], join=True))
            assert isinstance(grant, Grant)
        for done in waits:
            done.result()
    assert run_now(peers[-1].release(grant)) is True
    for peer in peers:
        run_now(peer.close())


def _backend(proxied_store: ProxiedStore) -> Backend:
    return open_store(proxied_store.url, Settings(namespace=proxied_store.namespace)).backend(
        BlockingRuntime()
    )


def test_a_ttl_below_the_floor_is_refused() -> None:
    """The error comes when the lock is made, if the limit is known without a request."""
    for url, floor in (("etcd://localhost", "2 s at least"), ("consul://localhost", "10 s at")):
        with holdfast.connect(url) as locks, pytest.raises(ValueError, match=floor):
            locks.lock("name", ttl=1)


@pytest.mark.usefixtures("no_recheck")
@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("kind", [MutualEtcd, MutualConsul])
def test_client_certificates(
    servers: Servers, kind: type[MutualEtcd | MutualConsul], flavour: Flavour
) -> None:
    """The client certificate is used for requests and for wake-ups; without one the server refuses
    the client."""
    server: MutualEtcd | MutualConsul = servers.of(kind)  # type: ignore[assignment]
    namespace = f"t{secrets.token_hex(6)}"
    with waited_for(mutual_url(server), namespace, flavour):
        pass
    with (
        holdfast.connect(server.url, namespace=namespace, patience=0.5) as locks,
        pytest.raises(BackendUnavailable),
    ):
        locks.lock("name").acquire(blocking=False)


def test_an_answer_of_another_type_is_named_as_json_does() -> None:
    for body, name in ((b"{}", "an object"), (b"null", "null"), (b"1", "a number")):
        with pytest.raises(DamagedAnswer, match=f"it is {name}, not a list"):
            JsonReader("consul://a", {}).read_as(list, body)
