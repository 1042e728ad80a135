"""Clusters of etcd and Consul whose servers connect through proxies, which can be cut."""

from __future__ import annotations

from base64 import b64decode, b64encode
from contextlib import suppress
from typing import Any, TypeVar

import psutil

from servers.consul import ConsulServer
from servers.ensemble import Trio
from servers.etcd import EtcdServer
from servers.http import LOOK_SECONDS
from servers.ports import LOOPBACK, free_port, give_back
from servers.process import Server, wait_until
from servers.pump import Pump
from servers.relay import Relay

__all__ = ["LinkedConsulTrio", "LinkedEtcdTrio"]


class Link(Pump):
    """The proxy in front of one node. It can block the connections of one other server.

    All nodes need the same list of addresses, so there is one proxy per node. The server at the
    other end of a connection is identified by its source port.
    """

    def __init__(self, port: int, target: tuple[str, int], *, host: str = LOOPBACK) -> None:
        self._blocked: Server | None = None
        self._known: dict[int, bool] = {}
        """Whether a source port is blocked. A cache: the look-up of the process is slow."""
        super().__init__(port, target, host=host)

    def block(self, server: Server | None) -> None:
        """Block a server, or none. Runs on the proxy's own thread."""
        self._blocked, self._known = server, {}

    def _register(self, selector: object) -> None:
        relays = self.relays
        self.relays = [relay for relay in relays if not self._blocks(relay)]
        try:
            super()._register(selector)  # type: ignore[arg-type]
        finally:
            self.relays = relays

    def _blocks(self, relay: Relay) -> bool:
        if self._blocked is None or not self._blocked.alive:
            return False
        with suppress(OSError, psutil.Error):
            port = relay.client.wire.getpeername()[1]
            if port not in self._known:
                own = psutil.Process(self._blocked.pid).net_connections("tcp4")
                self._known[port] = any(connection.laddr.port == port for connection in own)
            return self._known[port]
        return False

    def end(self) -> None:
        self.do(lambda: setattr(self, "ending", True))
        self.join()


class LinkedEtcd(EtcdServer):
    """A node that the others reach only through its proxy."""

    def __init__(self, *, election_ms: int = 1000) -> None:
        super().__init__(election_ms=election_ms)
        self.listen_port = self.peer_port
        self.link = Link(free_port(), (self.host, self.listen_port))
        self.peer_port = self.link.port

    def command(self) -> list[object]:  # type: ignore[override]
        words: list[object] = list(super().command())
        at = words.index("--listen-peer-urls") + 1
        words[at] = f"http://{self.host}:{self.listen_port}"
        return words

    def close(self) -> None:
        super().close()
        if not self.link.ending:
            self.link.end()
            give_back(self.link.port)


class LinkedConsul(ConsulServer):
    """A server whose consensus and forwarding go through its proxy; gossip does not."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.address = f"127.0.0.{100 + number}"
        # The proxy listens at the address that the server advertises.
        self.link = Link(self.server_port, (self.host, self.server_port), host=self.address)

    def _configuration(self) -> dict[str, Any]:
        settings = super()._configuration()
        others = [m for m in self.members if m is not self and isinstance(m, LinkedConsul)]
        settings["serf_lan"] = settings["advertise_addr"] = self.address
        settings["autopilot"] = {"server_stabilization_time": "1s"}
        settings["retry_join"] = [f"{m.address}:{m.serf_port}" for m in others]
        return settings

    def close(self) -> None:
        super().close()
        if not self.link.ending:
            self.link.end()


Linked = TypeVar("Linked", LinkedEtcd, LinkedConsul)


class LinkedTrio(Trio[Linked]):
    """Three servers whose connections to each other can be cut."""

    def leads(self, node: Linked) -> bool | None:
        return node.is_leader()

    def term_of(self, node: Linked) -> int:
        return node.term()

    def isolate(self, isolated: Linked) -> None:
        """Block all traffic between this server and the others. Connections stay open."""
        for node in self.nodes:
            if node is isolated:
                self._stall(node.link, True)
            else:
                self._block(node.link, isolated)

    def mend(self) -> None:
        """Start and reconnect all servers; return when the cluster is complete."""
        for node in self.nodes:
            self._stall(node.link, False)
            self._block(node.link, None)
            if node.alive and node.paused:
                node.resume()
        self.launch()
        self.wait_ready()
        self.wait_settled()

    def _stall(self, link: Link, stalled: bool) -> None:
        link.do(lambda: setattr(link, "stalled", stalled))

    def _block(self, link: Link, server: Linked | None) -> None:
        link.do(lambda: link.block(server))


class LinkedEtcdTrio(LinkedTrio[LinkedEtcd]):
    """Three nodes in one cluster."""

    def __init__(self) -> None:
        nodes = [LinkedEtcd() for _ in range(3)]
        for node in nodes:
            node.members = list(nodes)
        super().__init__(nodes)

    def left(self, namespace: str) -> list[str]:
        """Return all keys of a namespace."""
        first, end = (b64encode(f"{namespace}{end}".encode()).decode() for end in "/0")
        body = {"key": first, "range_end": end, "keys_only": True}
        found = self.follower().ask("/v3/kv/range", body).get("kvs", [])
        return [b64decode(kv["key"]).decode() for kv in found]


class LinkedConsulTrio(LinkedTrio[LinkedConsul]):
    """Three servers in one datacenter."""

    suffix = "?session_ttl_min=1"

    def __init__(self) -> None:
        nodes = [LinkedConsul(number) for number in range(3)]
        for node in nodes:
            node.members = list(nodes)
        super().__init__(nodes)

    def wait_settled(self) -> None:
        """Wait until all servers vote. A server that was removed after a long failure rejoins
        without a vote and gets one some seconds later; before that, the loss of another server
        would be the loss of the majority."""
        super().wait_settled()
        wait_until("three voters", lambda: self._votes() == [True] * len(self.nodes))

    def _votes(self) -> list[bool]:
        found = self.leader().ask("/v1/operator/raft/configuration", seconds=LOOK_SECONDS)
        return [server["Voter"] for server in found["Servers"]]

    def left(self, namespace: str) -> list[str]:
        """Return all keys of a namespace."""
        tree = [{"KV": {"Verb": "get-tree", "Key": f"{namespace}/"}}]
        found = self.follower().ask("/v1/txn", tree, method="PUT")
        return [result["KV"]["Key"] for result in found["Results"] or ()]
