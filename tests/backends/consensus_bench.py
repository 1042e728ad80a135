"""Servers of etcd and Consul that ask for a client's certificate, and Consul's cut links."""

from __future__ import annotations

import http.client
import socket
import ssl
from contextlib import suppress
from typing import Any

from backends.etcd_bench import Link
from holdfast.runtimes.clock import now
from servers.consul import ConsulServer
from servers.ensemble import Ensemble
from servers.etcd import EtcdServer
from servers.tls import Certificate

__all__ = ["LinkedConsul", "LinkedConsulTrio", "MutualConsul", "MutualEtcd"]


def _get(port: int, path: str, own: Certificate) -> int:
    """The status of one request that shows a certificate."""
    context = ssl.create_default_context(cafile=own.certificate)
    context.load_cert_chain(own.certificate, own.key)
    wire = http.client.HTTPSConnection("127.0.0.1", port, timeout=2, context=context)
    try:
        wire.request("GET", path)
        return wire.getresponse().status
    finally:
        wire.close()


class MutualEtcd(EtcdServer):
    """Lets nobody in who shows no certificate of its authority's."""

    def __init__(self) -> None:
        super().__init__(tls=True)
        assert self.tls is not None
        self.arguments += ["--client-cert-auth", "--trusted-ca-file", str(self.tls.certificate)]

    def answers(self) -> bool:
        assert self.tls is not None
        return _get(self.port, "/health", self.tls) == http.client.OK

    @property
    def mutual_url(self) -> str:
        assert self.tls is not None
        return f"{self.url}&cert={self.tls.certificate}&key={self.tls.key}"


class MutualConsul(ConsulServer):
    """Lets nobody in who shows no certificate of its authority's."""

    def __init__(self) -> None:
        super().__init__(tls=True)
        assert self.tls is not None
        self.config |= {"verify_incoming_https": True, "ca_file": str(self.tls.certificate)}

    def answers(self) -> bool:
        assert self.tls is not None
        return _get(self.port, "/v1/kv/?keys&consistent", self.tls) in (200, 404)

    @property
    def mutual_url(self) -> str:
        assert self.tls is not None
        return f"{self.url}&cert={self.tls.certificate}&key={self.tls.key}"


class ConsulLink(Link):
    """What other servers reach one server through, at the address that it tells them."""

    def __init__(self, address: str, node: ConsulServer) -> None:
        self.address = address
        super().__init__(node.server_port, (node.host, node.server_port))

    def open_door(self) -> None:
        if self.listener is None:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.address, self.port))
            listener.listen(512)
            listener.setblocking(False)
            self.listener = listener


class LinkedConsul(ConsulServer):
    """A server whose consensus and forwarding go through its link; only gossip does not."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.address = f"127.0.0.{100 + number}"
        self.link = ConsulLink(self.address, self)

    def _configuration(self) -> dict[str, Any]:
        settings = super()._configuration()
        others = [m for m in self.members if m is not self and isinstance(m, LinkedConsul)]
        settings["serf_lan"] = settings["advertise_addr"] = self.address
        settings["retry_join"] = [f"{m.address}:{m.serf_port}" for m in others]
        return settings

    def close(self) -> None:
        super().close()
        if not self.link.ending:
            self.link.do(lambda: setattr(self.link, "ending", True))
            self.link.join()


class LinkedConsulTrio(Ensemble[LinkedConsul]):
    """Three servers in one datacenter whose links can be cut."""

    def __init__(self) -> None:
        nodes = [LinkedConsul(number) for number in range(3)]
        for node in nodes:
            node.members = list(nodes)
        super().__init__(nodes)

    def url(self, *nodes: ConsulServer) -> str:
        hosts = ",".join(f"{node.host}:{node.port}" for node in nodes or self.nodes)
        return f"consul://{hosts}?session_ttl_min=1"

    def others(self, lonely: ConsulServer) -> str:
        """The URL of the other servers."""
        return self.url(*(node for node in self.nodes if node is not lonely))

    def find(self, *, leads: bool) -> LinkedConsul:
        """A server that leads, or one that follows, waited for during an election."""
        deadline = now() + 40
        while now() < deadline:
            with suppress(OSError):
                alive = [node for node in self.nodes if node.alive and not node.paused]
                leader = alive[0].ask("/v1/status/leader")
                for node in alive:
                    if leader and (leader == f"{node.address}:{node.server_port}") is leads:
                        return node
        raise AssertionError("no such server")

    def isolate(self, lonely: LinkedConsul) -> None:
        """Nothing passes between this server and the others; nobody is told."""
        for node in self.nodes:
            if node is lonely:
                node.link.do(lambda link=node.link: setattr(link, "stalled", True))  # type: ignore[misc]
            else:
                node.link.do(lambda link=node.link: link.shun(lonely))  # type: ignore[misc]

    def mend(self) -> None:
        """Everything runs and is connected again."""
        for node in self.nodes:
            node.link.do(lambda link=node.link: setattr(link, "stalled", False))  # type: ignore[misc]
            node.link.do(lambda link=node.link: link.shun(None))  # type: ignore[misc]
            if node.alive and node.paused:
                node.resume()
        self.launch()
        self.wait_ready()
