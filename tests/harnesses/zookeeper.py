"""``zookeeper://``: one server with short ticks."""

from __future__ import annotations

from harnesses.served import ServedHarness
from servers.process import Server
from servers.zookeeper import ZooKeeperServer

__all__ = ["HARNESSES"]

TICK_MS = 200


class _Server(ZooKeeperServer):
    """Allows the longest ttl of the suite, with its reserve."""

    def _configuration(self) -> list[str]:
        lines = [line for line in super()._configuration() if "maxSession" not in line]
        return [*lines, "maxSessionTimeout=120000"]


class ZooKeeperHarness(ServedHarness):
    """A session outlives its last sign of life by its reserve, and ends on a whole tick."""

    name = "zookeeper"
    ttl = 1.0
    extra_recovery = 2.0
    outage_recovery = 15.0

    def make_server(self) -> Server:
        return _Server(tick_ms=TICK_MS)


HARNESSES = (ZooKeeperHarness,)
