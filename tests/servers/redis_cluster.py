"""Redis Cluster: masters that share the slots, each with replicas if wanted."""

from collections.abc import Sequence
from functools import partial
from urllib.parse import quote

from servers.ensemble import Ensemble
from servers.process import wait_until
from servers.redis import RedisServer
from servers.tls import Certificate

_SLOTS = 16_384


class ClusterNode(RedisServer):
    name = "redis-cluster"

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        tls: bool | Certificate = False,
        password: str | None = None,
    ) -> None:
        super().__init__(tls=tls, password=password)
        self.bus_port = self.another_port()
        self.arguments += ["--cluster-enabled", "yes", "--cluster-port", str(self.bus_port)]
        self.arguments += ["--cluster-config-file", "nodes.conf", *arguments]
        self.arguments += ["--tls-cluster", "yes"] if tls else []

    @property
    def id(self) -> str:
        return str(self.ask("CLUSTER", "MYID"))


class RedisCluster(Ensemble[ClusterNode]):
    """Three masters; `replicas` is the number of replicas of each."""

    def __init__(
        self,
        *,
        masters: int = 3,
        replicas: int = 0,
        timeout_ms: int = 2000,
        tls: bool = False,
        password: str | None = None,
    ) -> None:
        arguments = ["--cluster-node-timeout", str(timeout_ms)]
        first = ClusterNode(arguments, tls=tls, password=password)
        self.tls = first.tls
        others = (
            ClusterNode(arguments, tls=self.tls or False, password=password)
            for _ in range(1, masters * (1 + replicas))
        )
        super().__init__([first, *others])
        self.masters = self.nodes[:masters]
        self.replicas = self.nodes[masters:]

    @property
    def url(self) -> str:
        password = self.nodes[0].password
        login = f":{quote(password, safe='')}@" if password else ""
        trust = f"?tls=on&ssl_ca_certs={self.tls.certificate}" if self.tls else ""
        return f"redis+cluster://{login}{self.hosts}{trust}"

    def wait_ready(self) -> None:
        super().wait_ready()
        if _says(self.nodes[0], "cluster_known_nodes:1\r"):
            self._join()
        for node in self.nodes:
            wait_until(node.name, partial(_says, node, "cluster_state:ok"))

    def _join(self) -> None:
        count = len(self.masters)
        for index, master in enumerate(self.masters):
            first, last = index * _SLOTS // count, (index + 1) * _SLOTS // count - 1
            master.ask("CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
            # Two nodes with the same epoch would first have to settle whose is higher.
            master.ask("CLUSTER", "SET-CONFIG-EPOCH", str(index + 1))
        first_node = self.nodes[0]
        for node in self.nodes[1:]:
            address = (first_node.host, str(first_node.port), str(first_node.bus_port))
            node.ask("CLUSTER", "MEET", *address)
        known = f"cluster_known_nodes:{len(self.nodes)}\r"
        for node in self.nodes:
            wait_until(node.name, partial(_says, node, known))
        for index, replica in enumerate(self.replicas):
            replica.ask("CLUSTER", "REPLICATE", self.masters[index % count].id)


def _says(node: ClusterNode, text: str) -> bool:
    return text in str(node.ask("CLUSTER", "INFO"))
