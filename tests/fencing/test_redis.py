"""What is peculiar to guards in Redis: scripts, clusters, the client's own habits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.cluster import RedisCluster

from holdfast import Fence, Mode, StaleFence
from holdfast.fencing.redis import fence_key, guard
from servers.redis import RedisServer
from servers.redis_cluster import RedisCluster as ClusterServers
from servers.registry import Servers


def fence(token: int) -> Fence:
    return Fence("lock", Mode.EXCLUSIVE, (), 0, token)


@pytest.fixture(params=[False, True], ids=["bytes", "text"])
def client(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Any]:
    url = servers.of(RedisServer).url
    made = redis.Redis.from_url(url, decode_responses=request.param)
    made.flushall()
    yield made
    made.close()


def word(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def test_its_words(client: Any) -> None:
    guarded = guard(client, "stock:7", fence(5))
    assert guarded.get() is None
    assert guarded.set(12, ex=100) is True
    assert word(guarded.get()) == "12"
    assert 0 < client.ttl("stock:7") <= 100
    assert guarded.set("13", keepttl=True) is True
    assert 0 < client.ttl("stock:7") <= 100
    assert guarded.set("14", key="other", px=5000) is True
    assert word(client.get("other")) == "14"
    assert guarded.delete() == 1
    assert guarded.delete("other", "third") == 1
    assert guarded.hset({"left": 3, "sold": 4}, key="hash") == 2
    read = guarded.hgetall(key="hash")
    assert {word(key): word(value) for key, value in read.items()} == {"left": "3", "sold": "4"}
    assert guarded.enter() is None


def test_nothing_happens_when_it_is_refused(client: Any) -> None:
    guard(client, "stock:7", fence(6)).set("fresh")
    stale = guard(client, "stock:7", fence(5))
    acts: list[Callable[[], Any]] = [
        lambda: stale.set("stale"),
        stale.delete,
        lambda: stale.hset({"a": 1}, key="hash"),
        lambda: stale.run("return redis.call('SET', 'other', 'stale')"),
        stale.get,
        stale.enter,
    ]
    for act in acts:
        with pytest.raises(StaleFence, match="token 6"):
            act()
    assert word(client.get("stock:7")) == "fresh"
    assert sorted(map(word, client.keys())) == ["stock:7", "{stock:7}:holdfast-fence"]


def test_a_script_of_ones_own(client: Any) -> None:
    guarded = guard(client, "stock:7", fence(5))
    script = """
    local left = tonumber(redis.call('GET', KEYS[1]) or ARGV[1])
    if left <= 0 then return redis.error_reply('sold out') end
    redis.call('SET', KEYS[1], left - 1)
    return {left - 1, #KEYS, #ARGV} -- with a comment at the end"""
    assert guarded.run(script, ["stock:7"], [2]) == [1, 1, 1]
    assert guarded.run(script, ["stock:7"], [2]) == [0, 1, 1]
    with pytest.raises(redis.ResponseError, match="sold out"):
        guarded.run(script, ["stock:7"], [2])
    assert guarded.run("local nothing = 1") is None
    assert guarded.run("return false") is None
    assert word(guarded.run("return redis.status_reply('FINE')")) == "FINE"
    with pytest.raises(redis.ResponseError):
        guarded.run("this is no Lua")
    with pytest.raises(ValueError, match="#!"):
        guarded.run("#!lua flags=no-writes\nreturn 1")


def test_scripts_may_be_forgotten(client: Any) -> None:
    guarded = guard(client, "stock:7", fence(5))
    for _ in range(2):
        client.script_flush()
        assert guarded.set("1")


def test_what_is_remembered_does_not_run_out(client: Any) -> None:
    guard(client, "stock:7", fence(5)).set("1", ex=100)
    assert client.ttl(fence_key("stock:7")) == -1


def test_bad_input(client: Any) -> None:
    for other in (client.pipeline(), object(), "redis://"):
        with pytest.raises(TypeError, match="client of redis-py"):
            guard(other, "stock:7", fence(5))
    with pytest.raises(ValueError, match="at least one field"):
        guard(client, "stock:7", fence(5)).hset({})


def test_asynchronously(servers: Servers) -> None:
    async def body() -> None:
        client = redis.asyncio.Redis.from_url(servers.of(RedisServer).url, protocol=3)
        await client.flushall()
        guarded = guard(client, "stock:7", fence(5))
        await guarded.hset({"left": 3})
        assert await guarded.hgetall() == {b"left": b"3"}
        assert await guarded.run("return #ARGV", args=[1, 2]) == 2
        with pytest.raises(StaleFence):
            await guard(client, "stock:7", fence(4)).enter()
        await client.aclose()

    asyncio.run(body())


def test_in_a_cluster(servers: Servers) -> None:
    cluster = servers.of(ClusterServers)
    host, port = cluster.nodes[0].host, cluster.nodes[0].port
    with RedisCluster(host=host, port=port) as client:
        for name in ("stock:7", "{shop}:stock:8", "a b"):
            guard(client, name, fence(5)).set("1")
            with pytest.raises(StaleFence):
                guard(client, name, fence(4)).set("2")


def test_where_it_is_remembered() -> None:
    assert fence_key("stock:7") == "{stock:7}:holdfast-fence"
    assert fence_key("{shop}:stock") == "{shop}:stock:holdfast-fence"
    assert fence_key("a{}b") == "{a{}b}:holdfast-fence"
