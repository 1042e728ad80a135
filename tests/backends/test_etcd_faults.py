"""Three etcd nodes, and what happens to them and to their watches alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import holdfast
from backends.consensus_bench import hold_once, somebody_waits
from backends.links import LinkedEtcdTrio
from backends.recovery import SOON, next_token
from holdfast.testing import Flavour
from servers.etcd import EtcdServer
from servers.proxy import Proxy
from servers.registry import Servers

pytestmark = pytest.mark.faults


@pytest.fixture
def trio(servers: Servers) -> Iterator[LinkedEtcdTrio]:
    running = servers.of(LinkedEtcdTrio)
    yield running
    running.mend()


def test_a_wait_outlives_compaction_and_its_leader(trio: LinkedEtcdTrio, namespace: str) -> None:
    """History is thrown away and the leader killed while somebody waits: it is woken after."""
    with holdfast.connect(trio.url, namespace=namespace, ttl=60) as ours:
        held = ours.lock("name").acquire()
        assert held
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(next_token, trio.url, namespace)
            somebody_waits(ours)
            node = trio.follower()
            puts = [node.ask("/v3/kv/put", {"key": "YQ==", "value": "YQ=="}) for _ in range(5)]
            node.ask("/v3/kv/compaction", {"revision": puts[-1]["header"]["revision"]})
            trio.leader().kill()
            with ours.lock("other", timeout=SOON):
                pass
            held.check()
            assert held.release() is True
            token, _ = later.result()
            assert token > held.token


def test_one_node_after_the_other_is_restarted(trio: LinkedEtcdTrio, namespace: str) -> None:
    """A rolling restart costs neither a hold nor the order of tokens."""
    with holdfast.connect(trio.url, namespace=namespace, ttl=60) as locks:
        kept = locks.lock("kept").acquire()
        assert kept
        tokens = []
        for node in trio.nodes:
            node.restart()
            with locks.lock("name", timeout=SOON) as lease:
                tokens.append(lease.token)
        assert tokens == sorted(set(tokens))
        kept.check()
        assert kept.release() is True


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_silent_socket_is_replaced(servers: Servers, namespace: str, flavour: Flavour) -> None:
    """A WebSocket on which nothing comes any more is given up, and waiters are woken again."""
    server = servers.of(EtcdServer)
    with Proxy(server) as proxy, holdfast.connect(server.url, namespace=namespace) as ours:
        held = ours.lock("name").acquire()
        assert held
        got = threading.Event()
        thread = threading.Thread(target=hold_once, args=(proxy.url, namespace, flavour, got))
        thread.start()
        somebody_waits(ours)
        proxy.stall()
        assert not got.wait(7)
        proxy.cut()  # what was sent meanwhile never arrives
        proxy.resume()
        assert not got.wait(4)
        assert held.release()
        assert got.wait(SOON)
        thread.join()
