"""``zookeeper://``: one server and three, with short ticks, and a fault proxy before each."""

from __future__ import annotations

from harnesses.served import ELECTION_SECONDS, EnsembleHarness, ServedHarness
from servers.process import Server
from servers.zookeeper import ZooKeeperServer, ZooKeeperTrio

__all__ = ["HARNESSES"]

TICK_MS = 200
TICK = f"?tick={TICK_MS / 1000:g}"
"""Said in the URL, so that a dead holder is replaced as soon as with short ticks it can be."""
LONGEST_MS = 120_000
"""Allows the longest ttl of the suite, with its reserve."""


class ZooKeeperHarness(ServedHarness):
    """A session outlives its last sign of life by its reserve, and ends on a whole tick."""

    name = "zookeeper"
    ttl = 1.0
    shortens = False
    suffix = TICK
    extra_recovery = 2.0
    outage_recovery = 15.0

    def make_server(self) -> Server:
        return ZooKeeperServer(tick_ms=TICK_MS, longest_ms=LONGEST_MS)


class ZooKeeperThreeHarness(EnsembleHarness):
    """Three servers. One that comes to lead gives every session its time again."""

    name = "zookeeper-three"
    repeats = scheme = "zookeeper"
    ttl = ZooKeeperHarness.ttl
    shortens = ZooKeeperHarness.shortens
    suffix = TICK
    extra_recovery = ZooKeeperHarness.extra_recovery + 1.5 * ttl + ELECTION_SECONDS
    outage_recovery = ZooKeeperHarness.outage_recovery

    def make_servers(self) -> ZooKeeperTrio:
        return ZooKeeperTrio(tick_ms=TICK_MS, longest_ms=LONGEST_MS)


HARNESSES = (ZooKeeperHarness, ZooKeeperThreeHarness)
