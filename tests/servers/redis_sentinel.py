"""Redis under Sentinel: a master, its replicas, and three sentinels that can agree on another."""

from functools import partial
from pathlib import Path
from urllib.parse import quote

from servers.ensemble import Ensemble
from servers.missing import program
from servers.process import Server, wait_until
from servers.redis import RedisServer
from servers.resp import Reply, ask


class Sentinel(Server):
    """One `redis-server --sentinel` that watches a master under the name `service`.

    It shares the master's certificate; the `password` is its own, not the master's."""

    name = "redis-sentinel"

    def __init__(
        self,
        master: RedisServer,
        *,
        service: str,
        quorum: int,
        down_ms: int,
        password: str | None = None,
    ) -> None:
        super().__init__()
        self.tls, self.password = master.tls, password
        self.lines = [
            f"port {0 if self.tls else self.port}",
            f"bind {self.host}",
            f"dir {self.data}",
            f"sentinel monitor {service} {master.host} {master.port} {quorum}",
            f"sentinel down-after-milliseconds {service} {down_ms}",
            f"sentinel failover-timeout {service} {max(down_ms * 3, 3000)}",
        ]
        if self.tls:
            self.lines += [f"tls-port {self.port}", *map(" ".join, self.tls.words)]
        if master.password:
            self.lines.append(f"sentinel auth-pass {service} {master.password}")
        if password:
            self.lines.append(f"requirepass {password}")

    def prepare(self) -> None:
        # Sentinel rewrites its configuration, so this is written only once per data folder.
        (self.data / "sentinel.conf").write_text("\n".join(self.lines) + "\n")

    def command(self) -> list[str | Path]:
        binary = program("redis-server", "redis-server")
        return [binary, self.data / "sentinel.conf", "--sentinel"]

    def answers(self) -> bool:
        return self.ask("PING") == "PONG"

    def ask(self, *words: str) -> Reply:
        """Asks the sentinel something."""
        trust = self.tls.certificate if self.tls else None
        return ask(self.host, self.port, *words, trust=trust, password=self.password)

    def url_at(self, port: int) -> str:
        return f"redis://{self.host}:{port}"


class SentinelTrio(Ensemble[Server]):
    """A master, replicas, and three sentinels that have found each other.

    `password` is that of master and replicas, `sentinel_password` that of the sentinels."""

    def __init__(
        self,
        *,
        service: str = "holdfast",
        replicas: int = 1,
        down_ms: int = 1000,
        tls: bool = False,
        password: str | None = None,
        sentinel_password: str | None = None,
    ) -> None:
        self.service = service
        self.master = master = RedisServer(tls=tls, password=password)
        self.replicas = [
            RedisServer(replica_of=master, tls=master.tls or False, password=password)
            for _ in range(replicas)
        ]
        watch = partial(Sentinel, master, service=service, quorum=2, down_ms=down_ms)
        self.sentinels = [watch(password=sentinel_password) for _ in range(3)]
        super().__init__([master, *self.replicas, *self.sentinels])

    @property
    def url(self) -> str:
        hosts = ",".join(f"{each.host}:{each.port}" for each in self.sentinels)
        password, own = self.master.password, self.sentinels[0].password
        login = f":{quote(password, safe='')}@" if password else ""
        options = [f"sentinel_password={quote(own, safe='')}"] if own else []
        if self.master.tls:
            options += ["tls=on", f"ssl_ca_certs={self.master.tls.certificate}"]
        question = f"?{'&'.join(options)}" if options else ""
        return f"redis+sentinel://{login}{hosts}/{self.service}{question}"

    def current_master(self) -> RedisServer:
        """The one that a sentinel names now."""
        sentinel = next(each for each in self.sentinels if each.alive)
        address = sentinel.ask("SENTINEL", "get-master-addr-by-name", self.service)
        assert isinstance(address, list)
        servers = [self.master, *self.replicas]
        return next(each for each in servers if str(each.port) == address[1])

    def launch(self) -> None:
        # A sentinel asks for replicas when it starts, and then again ten seconds later.
        with_data = Ensemble([self.master, *self.replicas])
        with_data.start()
        for replica in self.replicas:
            replica.wait_linked()
        super().launch()

    def wait_ready(self) -> None:
        super().wait_ready()
        for sentinel in self.sentinels:
            wait_until(sentinel.name, partial(self._knows_all, sentinel))

    def _knows_all(self, sentinel: Sentinel) -> bool:
        fields = sentinel.ask("SENTINEL", "master", self.service)
        assert isinstance(fields, list)
        state = dict(zip(fields[::2], fields[1::2], strict=True))
        counts = (state["num-other-sentinels"], state["num-slaves"])
        return counts == ("2", str(len(self.replicas)))
