"""Private servers for the run: the test bed's, on loopback, in temporary folders."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from holdfast.bench.contender import Target
from holdfast.cli import main as cli
from servers.consul import ConsulServer
from servers.etcd import EtcdServer
from servers.mysql import MySQLServer
from servers.postgres import PostgresServer
from servers.redis import RedisServer
from servers.zookeeper import ZooKeeperServer

__all__ = ["NAMESPACE", "Served", "served"]

NAMESPACE = "bench"
REDLOCK_NODES = 5

# On their defaults otherwise: etcd, ZooKeeper, PostgreSQL and MariaDB wait for the disk.
_SERVERS: dict[str, Any] = {
    "redis": RedisServer,
    "etcd": EtcdServer,
    "consul": ConsulServer,
    "zookeeper": lambda: ZooKeeperServer(tick_ms=2000),
    "postgres": PostgresServer,
    "mysql": lambda: MySQLServer(arguments=["--max-connections=1500"]),
}


class Served(NamedTuple):
    """A store that is up, and its servers."""

    target: Target
    nodes: list[Any]

    def mend(self) -> None:
        """Everything runs again."""
        for node in self.nodes:
            if node.alive and _stopped(node.pid):
                node.paused = True
                node.resume()
        for node in self.nodes:
            if not node.alive:
                node.start()
                if self.target.url.startswith("redlock"):
                    _mark_new(self.target.url)

    def aim(self) -> list[Any]:
        """The target as jobs are told it: servers may have come back under other numbers."""
        pids = [node.pid for node in self.nodes]
        return [self.target.url, pids, self.target.namespace]


def _mark_new(url: str) -> None:
    """As ``holdfast init`` does: these servers have forgotten nothing."""
    if cli(["init", url]):
        raise RuntimeError(f"{url} could not be marked as new")


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextmanager
def served(store: str) -> Iterator[Served]:
    """The store, until the block ends."""
    with ExitStack() as stack:
        if store == "memory":
            yield Served(Target("memory://bench", (), NAMESPACE), [])
        elif store == "sqlite":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            yield Served(Target(f"sqlite://{folder}/locks.db", (), NAMESPACE), [])
        elif store == "redlock":
            nodes = [stack.enter_context(RedisServer()) for _ in range(REDLOCK_NODES)]
            url = "redlock://" + ",".join(f"{node.host}:{node.port}" for node in nodes)
            _mark_new(url)
            yield Served(Target(url, tuple(node.pid for node in nodes), NAMESPACE), nodes)
        else:
            server = stack.enter_context(_SERVERS[store]())
            yield Served(Target(server.url, (server.pid,), NAMESPACE), [server])
