"""Faults of three etcd nodes, and of their watches alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.testing import Flavour
from servers.etcd import EtcdServer
from servers.proxy import Proxy
from servers.registry import Servers
from stores.ensembles import KINDS
from stores.monitored_holders import MonitoredHolders
from stores.network_partitions import LinkedEtcdTrio
from stores.recovery import at_both, name_at, next_token, nothing_is_left
from stores.waiting import waited_for, waits_across

pytestmark = pytest.mark.faults


@pytest.fixture
def trio(servers: Servers) -> Iterator[LinkedEtcdTrio]:
    running = servers.of(LinkedEtcdTrio)
    yield running
    running.mend()


@pytest.mark.usefixtures("no_recheck")
def test_a_wait_outlives_compaction_and_its_leader(trio: LinkedEtcdTrio, namespace: str) -> None:
    """The history is compacted and the leader killed during a wait: the waiter is still woken."""
    with waits_across(trio, namespace, KINDS["etcd"].longest) as leader:
        node = trio.follower()
        puts = [node.ask("/v3/kv/put", {"key": "YQ==", "value": "YQ=="}) for _ in range(5)]
        node.ask("/v3/kv/compaction", {"revision": puts[-1]["header"]["revision"]})
        leader.kill()
    nothing_is_left(trio, namespace)


def test_one_node_after_the_other_is_restarted(trio: LinkedEtcdTrio, namespace: str) -> None:
    """A rolling restart costs neither a hold nor the order of tokens."""
    with MonitoredHolders(trio, trio.url, namespace, KINDS["etcd"].longest) as monitored:
        tokens: dict[Flavour, list[int]] = {flavour: [] for flavour in Flavour}
        for node in trio.nodes:
            node.restart()
            taken = at_both(lambda at: next_token(trio.url, namespace, at, name_at(at, "other")))
            for flavour, each in taken.items():
                tokens[flavour].append(each.token)
        for seen in tokens.values():
            assert seen == sorted(set(seen))
        for holder in monitored.each:
            assert holder.release() is True
    nothing_is_left(trio, namespace)


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_silent_socket_is_replaced(servers: Servers, namespace: str, flavour: Flavour) -> None:
    """A connection that delivers nothing is given up, and waiters are woken again."""
    server = servers.of(EtcdServer)
    with Proxy(server) as proxy, waited_for(server.url, namespace, flavour, proxy.url) as waited:
        proxy.stall()
        assert not waited.got(within=7)
        proxy.cut()  # what was sent during the stall never arrives
        proxy.resume()
        assert not waited.got(within=4)
