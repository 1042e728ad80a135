"""What the harnesses of stores with servers have in common: servers, proxies, all knobs.

    class RedisHarness(ServedHarness):
        name = "redis"

        def make_server(self) -> Server:
            return RedisServer()

A store with several servers is an ``EnsembleHarness``; one server is an ensemble of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.testing import Harness, Knob
from servers.ensemble import Ensemble
from servers.process import Server
from servers.proxy import Proxy

__all__ = ["ELECTION_SECONDS", "EnsembleHarness", "ServedHarness"]

ELECTION_SECONDS = 3.0
"""How long servers that elect a leader may be without one."""


class EnsembleHarness(Harness):
    """Several servers and a fault proxy before each. Faults befall all of them at once: what a
    minority can do to a store is tested elsewhere."""

    knobs = frozenset(Knob)
    scheme = ""
    """What the store's URL begins with."""
    suffix = ""
    """What is added to it, such as ``?mode=advisory``."""
    servers: Ensemble[Any]
    proxies: list[Proxy]
    _reads = 0

    def make_servers(self) -> Ensemble[Any]:
        """The servers, not started yet."""
        raise NotImplementedError

    def url_at(self, ports: Sequence[int]) -> str:
        """The store's URL, with its servers or their proxies at these ports."""
        nodes = self.servers.nodes
        hosts = [f"{node.host}:{port}" for node, port in zip(nodes, ports, strict=True)]
        # A client asks the first host that lets it. Each begins with another one, so that what
        # one node has granted is seen, and waited for, through the others.
        self._reads += 1
        first = self._reads % len(hosts)
        return f"{self.scheme}://{','.join(hosts[first:] + hosts[:first])}{self.suffix}"

    @property
    def url(self) -> str:  # type: ignore[override]  # nobody sets it: it is another at each look
        return self.url_at([node.port for node in self.servers.nodes])

    @property
    def proxied_url(self) -> str:
        return self.url_at([proxy.port for proxy in self.proxies])

    def start(self) -> None:
        self.servers = self.make_servers()
        try:
            self.servers.start()
        except BaseException:
            self.servers.close()
            raise
        self.proxies = [Proxy(server) for server in self.servers.nodes]

    def stop(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        self.servers.close()

    def pause(self) -> None:
        self.servers.pause()

    def resume(self) -> None:
        self.servers.resume()

    def kill(self) -> None:
        self.servers.kill()

    def restart(self) -> None:
        self.servers.start()

    def cut(self) -> None:
        for proxy in self.proxies:
            proxy.cut()

    def stall(self) -> None:
        for proxy in self.proxies:
            proxy.stall()

    def unstall(self) -> None:
        for proxy in self.proxies:
            proxy.resume()

    def hold_replies(self) -> None:
        for proxy in self.proxies:
            proxy.hold_replies()

    def let_replies(self) -> None:
        for proxy in self.proxies:
            proxy.let_replies()

    def drop_next_reply(self) -> None:
        for proxy in self.proxies:
            proxy.drop_next_reply()

    def heal(self) -> None:
        for proxy in self.proxies:
            proxy.heal()
        for server in self.servers.nodes:
            if server.paused:
                server.resume()
        if not self.servers.alive:
            self.restart()
        self.servers.wait_ready()  # for an election that is still under way


class ServedHarness(EnsembleHarness):
    """One server and a fault proxy before it."""

    def make_server(self) -> Server:
        """The server, not started yet."""
        raise NotImplementedError

    def make_servers(self) -> Ensemble[Any]:
        return Ensemble([self.make_server()])

    def url_at(self, ports: Sequence[int]) -> str:
        (server,), (port,) = self.servers.nodes, ports
        return f"{server.url_at(port)}{self.suffix}"
