"""Everybody on five Redis servers at once."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import hiredis

import holdfast
from benchmarks.contenders.redis_limits import pack
from benchmarks.tape import APART_SECONDS, WARM_HOLDS, Relay, dial
from holdfast.bench.contender import REDLOCK, Client, Contender, Flavour, Opener, Pair, Target, ours

__all__ = ["CONTENDERS"]

TTL = 30
ONLY = frozenset({REDLOCK})
_DELETE = "return redis.call('GET',KEYS[1])==ARGV[1] and redis.call('DEL',KEYS[1])"


def _nodes(target: Target) -> list[tuple[str, int]]:
    hosts = urlsplit(target.url).netloc.split(",")
    return [(host.split(":")[0], int(host.split(":")[1])) for host in hosts]


def _raw(target: Target) -> Client:
    """What a lock without a fence could send: SET NX, and compare-and-delete."""
    name = f"{target.namespace}:raw"
    take = pack("SET", name, "owner", "NX", "PX", TTL * 1000)
    free = pack("EVAL", _DELETE, 1, name, "owner")
    return _replayed(target, take, free)


def _same(target: Target) -> Client:
    """The very scripts that Holdfast sends each node, as a relay before the first heard them."""
    (host, port), *others = _nodes(target)
    relay = Relay(f"redis://{host}:{port}")
    hosts = ",".join([urlsplit(relay.url).netloc, *(f"{host}:{port}" for host, port in others)])
    with holdfast.connect(f"redlock://{hosts}", namespace=f"{target.namespace}same") as locks:
        lock = locks.lock("same")
        for _ in range(WARM_HOLDS):
            with lock:
                time.sleep(APART_SECONDS)  # the relay tells the two requests apart
            time.sleep(APART_SECONDS)
    line = max(relay.lines, key=lambda line: len(line.exchanges))
    take, free = (bytes(request) for request, _ in line.exchanges[-2:])
    return _replayed(target, take, free)


def _replayed(target: Target, take: bytes, free: bytes) -> Client:
    """Sent to all at once, decided by the first three answers; late ones are dropped later."""
    links = {dial(f"redis://{host}:{port}"): hiredis.Reader() for host, port in _nodes(target)}
    late = dict.fromkeys(links, 0)
    quorum = len(links) // 2 + 1

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
                reader = links[sock]
                reader.feed(sock.recv(65536))
                while reader.gets() is not False:
                    late[sock] -= 1
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
    flavour: Flavour = "asyncio" if "asyncio" in name or name == "aioredlock" else "blocking"
    return Contender(name, "redlock", "peer", flavour, open_, ONLY)


_QUICK = {"socket_timeout": 0.05}

CONTENDERS = [
    Contender("raw sockets ×5, SET NX", "redlock", "least", "blocking", _raw, ONLY),
    Contender("raw sockets ×5, same scripts", "redlock", "limit", "blocking", _same, ONLY),
    *[replace(one, cases=ONLY) for one in ours("redlock")],
    _peer("pottery", _pottery()),
    _peer("pottery, 50 ms timeout", _pottery(**_QUICK)),
    _peer("pottery asyncio", _pottery_async()),
    _peer("pottery asyncio, 50 ms timeout", _pottery_async(**_QUICK)),
    _peer("redlock-py", _redlock_py()),
    _peer("redlock-py, 50 ms timeout", _redlock_py(**_QUICK)),
    _peer("aioredlock", _aioredlock),
]
