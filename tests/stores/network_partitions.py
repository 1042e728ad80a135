"""Servers of etcd and Consul that reach each other through links, which can be cut."""

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
    """What everybody reaches one node through; lets nobody through who is shunned.

    All nodes must be told the same addresses, so there is one link for each, and who comes
    through it is known by the port it comes from.
    """

    def __init__(self, port: int, target: tuple[str, int], *, host: str = LOOPBACK) -> None:
        self._shunned: Server | None = None
        self._known: dict[int, bool] = {}
        """Whether what comes from a port is to be kept out: to find out takes its time."""
        super().__init__(port, target, host=host)

    def shun(self, whom: Server | None) -> None:
        """On the link's own thread."""
        self._shunned, self._known = whom, {}

    def _register(self, selector: object) -> None:
        relays = self.relays
        self.relays = [relay for relay in relays if not self._shuns(relay)]
        try:
            super()._register(selector)  # type: ignore[arg-type]
        finally:
            self.relays = relays

    def _shuns(self, relay: Relay) -> bool:
        if self._shunned is None or not self._shunned.alive:
            return False
        with suppress(OSError, psutil.Error):
            port = relay.client.wire.getpeername()[1]
            if port not in self._known:
                own = psutil.Process(self._shunned.pid).net_connections("tcp4")
                self._known[port] = any(connection.laddr.port == port for connection in own)
            return self._known[port]
        return False

    def end(self) -> None:
        self.do(lambda: setattr(self, "ending", True))
        self.join()


class LinkedEtcd(EtcdServer):
    """A node that the others reach only through its link."""

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
    """A server whose consensus and forwarding go through its link; only gossip does not."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.address = f"127.0.0.{100 + number}"
        # What other servers reach it through is at the address that it tells them.
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
    """Three servers whose links can be cut."""

    def leads(self, node: Linked) -> bool | None:
        return node.is_leader()

    def term_of(self, node: Linked) -> int:
        return node.term()

    def isolate(self, lonely: Linked) -> None:
        """Nothing passes between this server and the others; nobody is told."""
        for node in self.nodes:
            if node is lonely:
                self._stall(node.link, True)
            else:
                self._shun(node.link, lonely)

    def mend(self) -> None:
        """Everything runs and is connected again."""
        for node in self.nodes:
            self._stall(node.link, False)
            self._shun(node.link, None)
            if node.alive and node.paused:
                node.resume()
        self.launch()
        self.wait_ready()
        self.wait_settled()

    def _stall(self, link: Link, stalled: bool) -> None:
        link.do(lambda: setattr(link, "stalled", stalled))

    def _shun(self, link: Link, whom: Linked | None) -> None:
        link.do(lambda: link.shun(whom))


class LinkedEtcdTrio(LinkedTrio[LinkedEtcd]):
    """Three nodes in one cluster."""

    def __init__(self) -> None:
        nodes = [LinkedEtcd() for _ in range(3)]
        for node in nodes:
            node.members = list(nodes)
        super().__init__(nodes)

    def left(self, namespace: str) -> list[str]:
        """All keys of a namespace."""
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
        """One that was dead for so long that it counted as gone comes back without a vote, and is
        given one some seconds later. Until then the loss of another would be that of a majority."""
        super().wait_settled()
        wait_until("three voters", lambda: self._votes() == [True] * len(self.nodes))

    def _votes(self) -> list[bool]:
        found = self.leader().ask("/v1/operator/raft/configuration", seconds=LOOK_SECONDS)
        return [server["Voter"] for server in found["Servers"]]

    def left(self, namespace: str) -> list[str]:
        """All keys of a namespace."""
        tree = [{"KV": {"Verb": "get-tree", "Key": f"{namespace}/"}}]
        found = self.follower().ask("/v1/txn", tree, method="PUT")
        return [result["KV"]["Key"] for result in found["Results"] or ()]
