"""Three etcd nodes whose links can be cut."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import psutil

import holdfast
from holdfast.runtimes.clock import now
from holdfast.testing import Flavour
from servers.ensemble import Ensemble
from servers.etcd import EtcdServer
from servers.ports import free_port, give_back
from servers.process import Server
from servers.pump import Pump
from servers.relay import Relay

__all__ = ["LinkedNode", "LinkedTrio"]


class Link(Pump):
    """What everybody reaches one node through; lets nobody through who is shunned.

    All nodes must be told the same addresses, so there is one link for each, and who comes
    through it is known by the port it comes from.
    """

    def __init__(self, port: int, target: tuple[str, int]) -> None:
        self._shunned: Server | None = None
        self._known: dict[int, bool] = {}
        """Whether what comes from a port is to be kept out: to find out takes its time."""
        super().__init__(port, target)

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


class LinkedNode(EtcdServer):
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
            self.link.do(lambda: setattr(self.link, "ending", True))
            self.link.join()
            give_back(self.link.port)


class LinkedTrio(Ensemble[LinkedNode]):
    """Three nodes in one cluster."""

    def __init__(self) -> None:
        nodes = [LinkedNode() for _ in range(3)]
        for node in nodes:
            node.members = list(nodes)
        super().__init__(nodes)

    @property
    def url(self) -> str:
        return f"etcd://{self.hosts}"

    def leader(self) -> LinkedNode:
        return self._find(leads=True)

    def follower(self) -> LinkedNode:
        return self._find(leads=False)

    def _find(self, *, leads: bool) -> LinkedNode:
        deadline = now() + 30
        while now() < deadline:
            for node in self.nodes:
                with suppress(OSError):
                    if node.alive and not node.paused and node.is_leader() is leads:
                        return node
        raise AssertionError("no such node")

    def others(self, lonely: EtcdServer) -> str:
        """The URL of the other nodes."""
        return f"etcd://{','.join(f'{n.host}:{n.port}' for n in self.nodes if n is not lonely)}"

    def isolate(self, lonely: LinkedNode) -> None:
        """Nothing passes between this node and the others; nobody is told."""
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


def hold_once(url: str, namespace: str, flavour: Flavour, got: threading.Event) -> None:
    """For a thread of its own: says when it has got the name."""
    if flavour is Flavour.BLOCKING:
        with holdfast.connect(url, namespace=namespace) as locks, locks.lock("name"):
            got.set()
    else:
        asyncio.run(_hold_once_async(url, namespace, got))


async def _hold_once_async(url: str, namespace: str, got: threading.Event) -> None:
    async with holdfast.connect_async(url, namespace=namespace) as locks, locks.lock("name"):
        got.set()
