"""Three Consul servers, and what happens to their sessions alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

import holdfast
from backends.links import LinkedConsulTrio
from backends.recovery import Believer, Tell
from servers.registry import Servers

pytestmark = pytest.mark.faults

TTL = 2.0
LOCK_DELAY = 4


@pytest.fixture
def trio(servers: Servers) -> Iterator[LinkedConsulTrio]:
    running = servers.of(LinkedConsulTrio)
    yield running
    running.mend()


def test_a_session_is_destroyed_from_outside(
    trio: LinkedConsulTrio, namespace: str, record_property: Tell
) -> None:
    """With a lock-delay the next one is let in only after the last one knows: nobody works at
    the same time as another."""
    url = f"{trio.url}&lock_delay={LOCK_DELAY}"
    with closing(Believer(url, namespace, "name", TTL)) as believer:
        for session in trio.nodes[0].ask("/v1/session/list"):
            if session["Name"].endswith(namespace):
                trio.nodes[0].ask(f"/v1/session/destroy/{session['ID']}", "", method="PUT")
        believer.loses(trio.url, namespace, LOCK_DELAY, record_property)
        assert "session" in believer.reason
    with holdfast.connect(trio.url, namespace=namespace) as locks:
        standing = locks.inspect("name")
        assert (standing.holders, standing.waiters) == ((), ())
