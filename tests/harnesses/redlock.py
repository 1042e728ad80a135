"""``redlock://``: three servers that keep their data, and a fault proxy before each."""

from __future__ import annotations

from harnesses.served import EnsembleHarness
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.redlock import open_store
from holdfast.url import parse_url
from servers.ensemble import Ensemble
from servers.redis import RedisServer

__all__ = ["HARNESSES", "mark_as_new"]


def mark_as_new(url: str) -> None:
    """What an operator does with ``holdfast init``."""
    backend = open_store(parse_url(url), Settings()).backend(BlockingRuntime())
    try:
        run_now(backend.initialise())
    finally:
        run_now(backend.close())


class RedlockHarness(EnsembleHarness):
    """Three masters; the operator says that they are new, or have kept everything."""

    name = "redlock"
    scheme = "redlock"
    ttl = 0.5
    shortens = False

    def make_servers(self) -> Ensemble[RedisServer]:
        return Ensemble([RedisServer(persist=True) for _ in range(3)])

    def start(self) -> None:
        super().start()
        mark_as_new(self.url)

    def restart(self) -> None:
        super().restart()
        # Their append-only files kept everything, and the operator says so.
        mark_as_new(self.url)


HARNESSES = (RedlockHarness,)
