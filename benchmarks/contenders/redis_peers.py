"""Locks on Redis by others, each as its own documentation has it used."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from benchmarks.contenders.common import ALL, WAITS
from holdfast.bench.contender import (
    DRAIN,
    HELD_TTL_SECONDS,
    Client,
    Contender,
    Flavour,
    Opener,
    Pair,
    Target,
)

__all__ = ["PEERS"]

TTL = 30


def _name(target: Target, name: str) -> str:
    return f"{target.namespace}:peer:{name}"


def _redis_py(**pool: Any) -> Opener:
    def opened(target: Target) -> Client:
        import redis

        client = redis.Redis.from_url(target.url, **pool)

        def lock(name: str) -> Pair:
            made = client.lock(_name(target, name), timeout=TTL, thread_local=False)
            return Pair(made.acquire, made.release)

        return Client(lock, client.close)

    return opened


def _redis_py_async(**pool: Any) -> Opener:
    async def opened(target: Target) -> Client:
        import redis.asyncio

        client: Any = redis.asyncio.Redis.from_url(target.url, **pool)

        def lock(name: str) -> Pair:
            made = client.lock(_name(target, name), timeout=TTL, thread_local=False)
            return Pair(made.acquire, made.release)

        return Client(lock, client.aclose)

    return opened


def _python_redis_lock(**options: Any) -> Opener:
    def opened(target: Target) -> Client:
        import redis
        import redis_lock

        client = redis.Redis.from_url(target.url)

        def lock(name: str) -> Pair:
            made = redis_lock.Lock(client, _name(target, name), **options)
            return Pair(made.acquire, made.release)

        return Client(lock, client.close)

    return opened


def _pottery(target: Target) -> Client:
    import pottery
    import redis

    client = redis.Redis.from_url(target.url)

    def lock(name: str) -> Pair:
        made = pottery.Redlock(key=_name(target, name), masters={client}, auto_release_time=TTL)
        return Pair(made.acquire, made.release)

    return Client(lock, client.close)


async def _pottery_async(target: Target) -> Client:
    import pottery
    import redis.asyncio

    client: Any = redis.asyncio.Redis.from_url(target.url)

    def lock(name: str) -> Pair:
        made = pottery.AIORedlock(key=_name(target, name), masters={client}, auto_release_time=TTL)
        return Pair(made.acquire, made.release)

    return Client(lock, client.aclose)


def _redlock_py(target: Target) -> Client:
    import redlock

    parts = urlsplit(target.url)
    manager = redlock.Redlock(
        [{"host": parts.hostname, "port": parts.port, "db": 0}],
        retry_count=100_000,
        retry_delay=0.2,
    )

    def lock(name: str) -> Pair:
        key, held = _name(target, name), []

        def acquire() -> None:
            held.append(manager.lock(key, TTL * 1000))

        return Pair(acquire, lambda: manager.unlock(held.pop()))

    return Client(lock, lambda: None)


def _sherlock(target: Target) -> Client:
    import redis
    import sherlock

    client = redis.StrictRedis.from_url(target.url)
    sherlock.configure(backend=sherlock.backends.REDIS, client=client, timeout=3600)

    def lock(name: str) -> Pair:
        made = sherlock.RedisLock(_name(target, name), client=client, expire=TTL, timeout=3600)
        return Pair(made.acquire, made.release)

    return Client(lock, client.close)


def _tooz(target: Target) -> Client:
    from tooz import coordination

    parts = urlsplit(target.url)
    coordinator = coordination.get_coordinator(
        f"redis://{parts.hostname}:{parts.port}?lock_timeout={TTL}", b"benchmark"
    )
    coordinator.start()

    def lock(name: str) -> Pair:
        made = coordinator.get_lock(_name(target, name).encode())
        return Pair(made.acquire, made.release)

    return Client(lock, coordinator.stop)


def _tooz_held(target: Target) -> Client:
    from tooz import coordination

    parts = urlsplit(target.url)
    coordinator = coordination.get_coordinator(
        f"redis://{parts.hostname}:{parts.port}?lock_timeout={HELD_TTL_SECONDS:g}", b"held"
    )
    coordinator.start(start_heart=True)

    def lock(name: str) -> Pair:
        made = coordinator.get_lock(_name(target, name).encode())
        return Pair(made.acquire, made.release)

    return Client(lock, coordinator.stop)


def _portalocker(target: Target) -> Client:
    import portalocker
    import redis

    client = redis.Redis.from_url(target.url)

    def lock(name: str) -> Pair:
        made = portalocker.RedisLock(_name(target, name), connection=client, timeout=3600)
        return Pair(made.acquire, made.release)

    return Client(lock, client.close)


async def _aioredlock(target: Target) -> Client:
    import aioredlock

    manager = aioredlock.Aioredlock(
        [target.url.removesuffix("/0")], retry_count=100_000, retry_delay_min=0.1
    )

    def lock(name: str) -> Pair:
        key, held = _name(target, name), []

        async def acquire() -> None:
            held.append(await manager.lock(key, lock_timeout=TTL))

        async def release() -> None:
            await manager.unlock(held.pop())

        return Pair(acquire, release)

    return Client(lock, manager.destroy)


def _peer(name: str, open_: Opener, cases: frozenset[str] = WAITS, **more: Any) -> Contender:
    flavour: Flavour = "asyncio" if "asyncio" in name or name == "aioredlock" else "blocking"
    return Contender(name, "redis", "peer", flavour, open_, cases, **more)


_BIG = {"max_connections": 4096}
_renewing = _python_redis_lock(expire=int(HELD_TTL_SECONDS), auto_renewal=True)

PEERS = [
    _peer("redis-py Lock", _redis_py(), ALL),
    _peer("redis-py Lock asyncio", _redis_py_async(), ALL),
    _peer("redis-py Lock asyncio, pool 4096", _redis_py_async(**_BIG), frozenset({DRAIN})),
    _peer("python-redis-lock", _python_redis_lock(expire=TTL), ALL, open_held=_renewing),
    _peer("pottery", _pottery, ALL),
    _peer("pottery asyncio", _pottery_async, ALL),
    _peer("redlock-py", _redlock_py),
    _peer("sherlock", _sherlock),
    _peer("tooz", _tooz, WAITS, open_held=_tooz_held),
    _peer("portalocker RedisLock", _portalocker),
    _peer("aioredlock", _aioredlock),
]
