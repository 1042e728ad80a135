"""``redlock://``: three servers that keep their data, and a fault proxy before each."""

from __future__ import annotations

from holdfast.backends.redlock import initialise, open_store
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.runtimes.blocking import BlockingRuntime
from holdfast.testing import Harness, Knob
from holdfast.url import parse_url
from servers.ensemble import Ensemble
from servers.proxy import Proxy
from servers.redis import RedisServer

__all__ = ["HARNESSES", "mark_as_new"]


def mark_as_new(url: str) -> None:
    """What an operator does with ``holdfast init``."""
    backend = open_store(parse_url(url), Settings()).backend(BlockingRuntime())
    try:
        run_now(initialise(backend))
    finally:
        run_now(backend.close())


class RedlockHarness(Harness):
    """Faults befall all nodes at once: what a minority can do to a store is tested elsewhere."""

    name = "redlock"
    ttl = 0.5
    knobs = frozenset(Knob)
    servers: Ensemble[RedisServer]
    proxies: list[Proxy]

    def start(self) -> None:
        self.servers = Ensemble([RedisServer(persist=True) for _ in range(3)])
        try:
            self.servers.start()
        except BaseException:
            self.servers.close()
            raise
        self.proxies = [Proxy(server) for server in self.servers.nodes]
        self.url = f"redlock://{self.servers.hosts}"
        mark_as_new(self.url)

    def stop(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        self.servers.close()

    @property
    def proxied_url(self) -> str:
        hosts = (f"{proxy.server.host}:{proxy.port}" for proxy in self.proxies)
        return f"redlock://{','.join(hosts)}"

    def pause(self) -> None:
        self.servers.pause()

    def resume(self) -> None:
        self.servers.resume()

    def kill(self) -> None:
        self.servers.kill()

    def restart(self) -> None:
        self.servers.start()
        # Their append-only files kept everything, and the operator says so.
        mark_as_new(self.url)

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


HARNESSES = (RedlockHarness,)
