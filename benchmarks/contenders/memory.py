"""One process: Holdfast's store for tests, and what the standard library has."""

from __future__ import annotations

import asyncio
import threading

from benchmarks.contenders.common import ALONE, nothing
from holdfast.bench.contender import DRAIN, Client, Contender, Pair, Target, ours

__all__ = ["CONTENDERS"]


def _threading(_: Target) -> Client:
    locks: dict[str, threading.Lock] = {}

    def lock(name: str) -> Pair:
        made = locks.setdefault(name, threading.Lock())
        return Pair(made.acquire, made.release)

    return Client(lock, nothing)


async def _asyncio(_: Target) -> Client:
    locks: dict[str, asyncio.Lock] = {}

    def lock(name: str) -> Pair:
        made = locks.setdefault(name, asyncio.Lock())

        async def release() -> None:
            made.release()

        return Pair(made.acquire, release)

    async def close() -> None:
        pass

    return Client(lock, close)


_CASES = frozenset({*ALONE, DRAIN})

CONTENDERS = [
    Contender("threading.Lock", "memory", "least", "blocking", _threading, _CASES),
    Contender("asyncio.Lock", "memory", "least", "asyncio", _asyncio, _CASES),
    *ours("memory", cases=_CASES),
]
