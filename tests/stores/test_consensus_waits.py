"""Waits on a cluster of etcd, Consul or ZooKeeper continue when the leader is gone."""

from __future__ import annotations

from typing import Any

import pytest

from stores import ensembles
from stores.ensembles import Kind, every_kind
from stores.recovery import nothing_is_left
from stores.waiting import waits_across

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("no_recheck")]
kind, trio = ensembles.kind, ensembles.trio


@every_kind
def test_a_wait_outlives_its_leader(trio: Any, kind: Kind, namespace: str) -> None:
    """The leader is killed while claims wait. A later release wakes them, without polling."""
    with waits_across(trio, namespace, kind.longest) as leader:
        leader.kill()
    nothing_is_left(trio, namespace)
