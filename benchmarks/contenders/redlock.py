"""Everybody on five Redis servers at once."""

from __future__ import annotations

import select
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from benchmarks.contenders.redis_limits import pack
from benchmarks.tape import dial
from holdfast.bench.contender import REDLOCK, Client, Contender, Door, Opener, Pair, Target, ours

__all__ = ["CONTENDERS"]

TTL = 30
ONLY = frozenset({REDLOCK})
_DELETE = "return redis.call('GET',KEYS[1])==ARGV[1] and redis.call('DEL',KEYS[1])"


def _nodes(target: Target) -> list[tuple[str, int]]:
    hosts = urlsplit(target.url).netloc.split(",")
    return [(host.split(":")[0], int(host.split(":")[1])) for host in hosts]


def _raw(target: Target) -> Client:
    """SET NX to all at once, decided by the first three answers; late ones are dropped later."""
    socks = [dial(f"redis://{host}:{port}") for host, port in _nodes(target)]
    late = dict.fromkeys(socks, 0)
    name = f"{target.namespace}:raw"
    take = pack("SET", name, "owner", "NX", "PX", TTL * 1000)
    free = pack("EVAL", _DELETE, 1, name, "owner")
    quorum = len(socks) // 2 + 1

    def ask(request: bytes) -> None:
        for sock in list(late):
            try:
                sock.sendall(request)
                late[sock] += 1
            except OSError:
                del late[sock]
        waiting, answers = set(late), 0
        while answers < quorum:
            for sock in select.select(list(waiting), [], [])[0]:
                late[sock] -= sock.recv(65536).count(b"\r\n")
                if late[sock] <= 0:
                    waiting.discard(sock)
                    answers += 1

    return Client(lambda _: Pair(lambda: ask(take), lambda: ask(free)), lambda: None)


def _clients(module: Any, target: Target, **options: Any) -> set[Any]:
    return {module.Redis(host=host, port=port, **options) for host, port in _nodes(target)}


def _pottery(**options: Any) -> Opener:
    def opened(target: Target) -> Client:
        import pottery
        import redis

        masters = _clients(redis, target, **options)

        def lock(name: str) -> Pair:
            made = pottery.Redlock(key=name, masters=masters, auto_release_time=TTL)
            return Pair(made.acquire, made.release)

        return Client(lock, lambda: None)

    return opened


def _pottery_async(**options: Any) -> Opener:
    async def opened(target: Target) -> Client:
        import pottery
        import redis.asyncio

        masters = _clients(redis.asyncio, target, **options)

        def lock(name: str) -> Pair:
            made = pottery.AIORedlock(key=name, masters=masters, auto_release_time=TTL)
            return Pair(made.acquire, made.release)

        return Client(lock, lambda: None)

    return opened


def _redlock_py(**options: Any) -> Opener:
    def opened(target: Target) -> Client:
        import redlock

        nodes = [{"host": host, "port": port, "db": 0, **options} for host, port in _nodes(target)]
        manager = redlock.Redlock(nodes)

        def lock(name: str) -> Pair:
            held: list[Any] = []

            def acquire() -> None:
                got = manager.lock(name, TTL * 1000)
                if not got:
                    raise RuntimeError("redlock-py did not get the lock")
                held.append(got)

            return Pair(acquire, lambda: manager.unlock(held.pop()))

        return Client(lock, lambda: None)

    return opened


async def _aioredlock(target: Target) -> Client:
    import aioredlock

    manager = aioredlock.Aioredlock([f"redis://{host}:{port}" for host, port in _nodes(target)])

    def lock(name: str) -> Pair:
        held: list[Any] = []

        async def acquire() -> None:
            held.append(await manager.lock(name, lock_timeout=TTL))

        async def release() -> None:
            await manager.unlock(held.pop())

        return Pair(acquire, release)

    return Client(lock, manager.destroy)


def _peer(name: str, open_: Callable[..., Any]) -> Contender:
    door: Door = "asyncio" if "asyncio" in name or name == "aioredlock" else "blocking"
    return Contender(name, "redlock", "peer", door, open_, ONLY)


_QUICK = {"socket_timeout": 0.05}

CONTENDERS = [
    Contender("raw sockets ×5", "redlock", "limit", "blocking", _raw, ONLY),
    *[replace(one, cases=ONLY) for one in ours("redlock")],
    _peer("pottery", _pottery()),
    _peer("pottery, 50 ms timeout", _pottery(**_QUICK)),
    _peer("pottery asyncio", _pottery_async()),
    _peer("pottery asyncio, 50 ms timeout", _pottery_async(**_QUICK)),
    _peer("redlock-py", _redlock_py()),
    _peer("redlock-py, 50 ms timeout", _redlock_py(**_QUICK)),
    _peer("aioredlock", _aioredlock),
]
