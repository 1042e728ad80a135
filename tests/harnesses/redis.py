"""``redis://``, to Redis and to Valkey: one server that keeps its data, and a fault proxy."""

from __future__ import annotations

from harnesses.served import ServedHarness
from servers.process import Server
from servers.redis import RedisServer
from servers.valkey import ValkeyServer

__all__ = ["HARNESSES"]


class RedisHarness(ServedHarness):
    """Redis alone, with an append-only file, as a store that promises to keep its data needs."""

    name = "redis"
    ttl = 0.5

    def make_server(self) -> Server:
        return RedisServer(persist=True)


class ValkeyHarness(RedisHarness):
    """The same on Valkey."""

    name = "redis-valkey"
    repeats = "redis"

    def make_server(self) -> Server:
        return ValkeyServer(persist=True)


HARNESSES = (RedisHarness, ValkeyHarness)
