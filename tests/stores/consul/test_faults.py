"""Three Consul servers, and faults of their sessions that no other store has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.io.clock import now
from holdfast.stores.consul.orphans import LOCK_DELAY_POLL_SECONDS
from holdfast.stores.consul.session import NODE
from servers.consul import ConsulServer
from servers.http import LOOK_SECONDS
from servers.process import wait_until
from servers.registry import Servers
from stores.ensembles import KINDS
from stores.monitored_holders import MonitoredHolders
from stores.network_partitions import LinkedConsulTrio
from stores.recovery import SOON, Tell, nothing_is_left

pytestmark = pytest.mark.faults

CONSUL = KINDS["consul"]
LOCK_DELAY = 4
DELAYED = CONSUL.ended._replace(seconds=LOCK_DELAY + LOCK_DELAY_POLL_SECONDS)


@pytest.fixture
def trio(servers: Servers) -> Iterator[LinkedConsulTrio]:
    running = servers.of(LinkedConsulTrio)
    yield running
    running.mend()


def test_a_session_is_destroyed_from_outside(
    trio: LinkedConsulTrio, namespace: str, record_property: Tell
) -> None:
    """With a lock-delay the next claim enters only after the holder knows of its loss: two
    holders never work at the same time."""
    url = f"{trio.url}&lock_delay={LOCK_DELAY}"
    with MonitoredHolders(trio, url, namespace, CONSUL.ttl) as monitored:
        for session in trio.nodes[0].ask("/v1/session/list"):
            if session["Name"].endswith(namespace):
                trio.nodes[0].ask(f"/v1/session/destroy/{session['ID']}", "", method="PUT")
        monitored.check_lost(DELAYED, record_property, cut=now())
        for holder in monitored.each:
            assert "session" in holder.reason
    nothing_is_left(trio, namespace)


def test_a_hold_outlives_the_server_that_granted_it(
    trio: LinkedConsulTrio, namespace: str, record_property: Tell
) -> None:
    """Consul removes a server that is dead for some seconds, and ends the sessions that are bound
    to it. Holds of live clients must not be bound to it."""
    leader = trio.leader()
    others = [node for node in trio.nodes if node is not leader]
    url = trio.url_of(leader, *others)
    with MonitoredHolders(trio, url, namespace, CONSUL.longest) as monitored:
        leader.kill()
        wait_until("the server's removal", lambda: len(_nodes(others[0])) == len(others), SOON)
        for holder in monitored.each:
            assert holder.still_holds(trio.others(leader))
            assert holder.release() is True
        monitored.check_succeeded(CONSUL.asked, record_property, without=leader)
        trio.mend()
    nothing_is_left(trio, namespace)


def _nodes(server: ConsulServer) -> list[str]:
    """The servers in the catalog."""
    nodes = server.ask("/v1/catalog/nodes", seconds=LOOK_SECONDS)
    return [node["Node"] for node in nodes if node["Node"] != NODE]
