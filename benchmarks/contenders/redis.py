"""Everybody on one Redis."""

from __future__ import annotations

from benchmarks.contenders.redis_limits import LIMITS
from benchmarks.contenders.redis_peers import PEERS
from holdfast.bench.contender import ours

__all__ = ["CONTENDERS"]

CONTENDERS = [*LIMITS, *ours("redis"), *PEERS]
