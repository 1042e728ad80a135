"""Three Consul servers, and what happens to their sessions alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backends.believers import Believers
from backends.ensembles import KINDS
from backends.links import LinkedConsulTrio
from backends.recovery import Tell, nothing_is_left
from holdfast.backends.consul_remains import RETRY_SECONDS
from holdfast.runtimes.clock import now
from servers.registry import Servers

pytestmark = pytest.mark.faults

CONSUL = KINDS["consul"]
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
    with Believers(trio, url, namespace, CONSUL.ttl) as believers:
        for session in trio.nodes[0].ask("/v1/session/list"):
            if session["Name"].endswith(namespace):
                trio.nodes[0].ask(f"/v1/session/destroy/{session['ID']}", "", method="PUT")
        believers.lose(LOCK_DELAY + RETRY_SECONDS, record_property, cut=now())
        for believer in believers.each:
            assert "session" in believer.reason
    nothing_is_left(trio, namespace)
