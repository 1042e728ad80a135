"""Redis under Sentinel: a master, its replicas, and three sentinels that can agree on another."""

from functools import partial
from pathlib import Path

from servers.ensemble import Ensemble
from servers.missing import program
from servers.process import Server, wait_until
from servers.redis import RedisServer
from servers.resp import ask


class Sentinel(Server):
    """One `redis-server --sentinel` that watches a master under the name `service`."""

    name = "redis-sentinel"

    def __init__(self, master: RedisServer, *, service: str, quorum: int, down_ms: int) -> None:
        super().__init__()
        self.lines = [
            f"port {self.port}",
            f"bind {self.host}",
            f"dir {self.data}",
            f"sentinel monitor {service} {master.host} {master.port} {quorum}",
            f"sentinel down-after-milliseconds {service} {down_ms}",
            f"sentinel failover-timeout {service} {max(down_ms * 3, 3000)}",
        ]

    def prepare(self) -> None:
        # Sentinel rewrites its configuration, so this is written only once per data folder.
        (self.data / "sentinel.conf").write_text("\n".join(self.lines) + "\n")

    def command(self) -> list[str | Path]:
        binary = program("redis-server", "redis-server")
        return [binary, self.data / "sentinel.conf", "--sentinel"]

    def answers(self) -> bool:
        return ask(self.host, self.port, "PING") == "PONG"

    def url_at(self, port: int) -> str:
        return f"redis://{self.host}:{port}"


class SentinelTrio(Ensemble[Server]):
    """A master, replicas, and three sentinels that have found each other."""

    def __init__(
        self, *, service: str = "holdfast", replicas: int = 1, down_ms: int = 1000
    ) -> None:
        self.service = service
        self.master = RedisServer()
        self.replicas = [RedisServer(replica_of=self.master) for _ in range(replicas)]
        self.sentinels = [
            Sentinel(self.master, service=service, quorum=2, down_ms=down_ms) for _ in range(3)
        ]
        super().__init__([self.master, *self.replicas, *self.sentinels])

    @property
    def url(self) -> str:
        hosts = ",".join(f"{each.host}:{each.port}" for each in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.service}"

    def current_master(self) -> RedisServer:
        """The one that a sentinel names now."""
        sentinel = next(each for each in self.sentinels if each.alive)
        words = ("SENTINEL", "get-master-addr-by-name", self.service)
        address = ask(sentinel.host, sentinel.port, *words)
        assert isinstance(address, list)
        servers = [self.master, *self.replicas]
        return next(each for each in servers if str(each.port) == address[1])

    def wait_ready(self) -> None:
        super().wait_ready()
        for replica in self.replicas:
            replica.wait_linked()
        for sentinel in self.sentinels:
            wait_until(sentinel.name, partial(self._knows_all, sentinel))

    def _knows_all(self, sentinel: Sentinel) -> bool:
        fields = ask(sentinel.host, sentinel.port, "SENTINEL", "master", self.service)
        assert isinstance(fields, list)
        state = dict(zip(fields[::2], fields[1::2], strict=True))
        counts = (state["num-other-sentinels"], state["num-slaves"])
        return counts == ("2", str(len(self.replicas)))
