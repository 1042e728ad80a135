"""What the harness of a store with a server has in common: a server, a proxy, all knobs.

    class RedisHarness(ServedHarness):
        name = "redis"

        def make_server(self) -> Server:
            return RedisServer()

A store with several servers overrides ``start``, ``stop`` and the knobs.
"""

from __future__ import annotations

from holdfast.testing import Harness, Knob
from servers.process import Server
from servers.proxy import Proxy

__all__ = ["ServedHarness"]


class ServedHarness(Harness):
    """One server and a fault proxy before it."""

    knobs = frozenset(Knob)
    suffix = ""
    """What is added to the server's URL, such as ``?mode=advisory``."""
    server: Server
    proxy: Proxy

    def make_server(self) -> Server:
        """The server, not started yet."""
        raise NotImplementedError

    def start(self) -> None:
        self.server = self.make_server()
        try:
            self.server.start()
        except BaseException:
            self.server.close()
            raise
        self.proxy = Proxy(self.server)
        self.url = self.server.url + self.suffix

    def stop(self) -> None:
        self.proxy.close()
        self.server.close()

    @property
    def proxied_url(self) -> str:
        return self.proxy.url + self.suffix

    def pause(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    def kill(self) -> None:
        self.server.kill()

    def restart(self) -> None:
        self.server.start()

    def cut(self) -> None:
        self.proxy.cut()

    def stall(self) -> None:
        self.proxy.stall()

    def unstall(self) -> None:
        self.proxy.resume()

    def hold_replies(self) -> None:
        self.proxy.hold_replies()

    def let_replies(self) -> None:
        self.proxy.let_replies()

    def drop_next_reply(self) -> None:
        self.proxy.drop_next_reply()

    def heal(self) -> None:
        self.proxy.heal()
        if self.server.paused:
            self.server.resume()
        if not self.server.alive:
            self.server.start()
