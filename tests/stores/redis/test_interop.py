"""``interop=redis-py``: redis-py's ``Lock`` and Holdfast exclude each other."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections import Counter
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import redis
from redis.lock import Lock as RedisPyLock

from holdfast.claim import Busy, Grant, Mode
from holdfast.core.contract import Guarantee, Settings
from holdfast.errors import Unsupported
from holdfast.io.clock import now
from holdfast.stores.redis.routes import key_slot
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from holdfast.testing.history import RecordedHold, faults, read_holds
from holdfast.testing.processes import Process
from holdfast.url import open_store
from servers.redis import RedisServer
from servers.redis_cluster import RedisCluster
from servers.registry import Servers
from stores.redis.helpers import Slot, blocking_and_asyncio, clients, over, until

INTEROP = "?interop=redis-py"
SECONDS = 60.0


def _name() -> str:
    """A unique name: the key of redis-py's Lock has no namespace."""
    return f"old-{secrets.token_hex(6)}"


@blocking_and_asyncio
def test_redis_py_and_holdfast_exclude_each_other(servers: Servers, flavour: Flavour) -> None:
    server = servers.of(RedisServer)
    client = redis.Redis(server.host, server.port)

    async def body(bench: Bench) -> None:
        name = _name()
        old = RedisPyLock(client, name, timeout=30, blocking=False)
        peer = bench.peer()
        assert old.acquire()
        claim = bench.claim(name)
        assert (await peer.queue(claim)).retry_seconds == pytest.approx(0.1)
        old.release()
        grant = await peer.take(claim)
        assert client.get(name) == grant.claim.owner.encode()
        assert not old.acquire()
        assert (await peer.renew([grant])).lost == {}
        assert await peer.release(grant)
        assert old.acquire()
        old.release()
        with pytest.raises(Unsupported, match="exclusive locks only"):
            await peer.attempt(bench.claim(name, Mode.SHARED))

    over(server.url + INTEROP, flavour, body)
    client.close()


@blocking_and_asyncio
def test_the_key_of_redis_py_ends_no_sooner_than_the_hold(
    servers: Servers, flavour: Flavour
) -> None:
    """A late renewal or attempt does not shorten it either; its owner may."""
    server = servers.of(RedisServer)

    async def body(bench: Bench) -> None:
        name = _name()
        peer = bench.peer()
        grant = await peer.take(bench.claim(name, ttl=60.0))
        late = grant._replace(claim=grant.claim._replace(ttl=20.0))
        assert (await peer.renew([late])).lost == {}
        assert int(str(server.ask("PTTL", name))) > 40_000
        assert isinstance(await peer.attempt(late.claim), Grant)
        assert int(str(server.ask("PTTL", name))) > 40_000
        assert (await peer.extend(late, shorten=True)).lost == {}
        assert 0 < int(str(server.ask("PTTL", name))) <= 20_000
        assert await peer.release(grant)

    over(server.url + INTEROP, flavour, body)


@blocking_and_asyncio
def test_a_hold_whose_key_redis_py_took_is_lost(servers: Servers, flavour: Flavour) -> None:
    server = servers.of(RedisServer)

    async def body(bench: Bench) -> None:
        name = _name()
        peer = bench.peer()
        grant = await peer.take(bench.claim(name))
        server.ask("SET", name, "somebody", "PX", "30000")
        assert grant.claim.owner in (await peer.renew([grant])).lost
        await peer.release(grant)
        assert server.ask("GET", name) == "somebody"

    over(server.url + INTEROP, flavour, body)


@blocking_and_asyncio
def test_from_redis_py_to_native_without_a_gap(servers: Servers, flavour: Flavour) -> None:
    """Clients with and without interop see each other's holds, so clients can be migrated one by
    one."""
    server = servers.of(RedisServer)

    async def body(bench: Bench) -> None:
        name = _name()
        moving = bench.peer()
        bench.harness.url = server.url
        native = bench.peer()
        first = await moving.take(bench.claim(name))
        assert isinstance(await native.attempt(bench.claim(name), join=False), Busy)
        assert await moving.release(first)
        second = await native.take(bench.claim(name))
        assert second.token > first.token
        assert isinstance(await moving.attempt(bench.claim(name), join=False), Busy)
        assert await native.release(second)
        assert isinstance(await moving.attempt(bench.claim(name)), Grant)

    over(server.url + INTEROP, flavour, body)


class Contenders:
    """Processes that contend for one name: two of each client, three with redis-py's Lock."""

    ENOUGH = 10
    """How often holds of each client must be followed by one of redis-py's Lock, and vice versa."""

    def __init__(self, server: RedisServer, name: str, folder: Path) -> None:
        self.name, self.path, self._enough = name, folder / "history", folder / "enough"
        self.clients = {
            process.name: (process, str(flavour))
            for flavour in list(Flavour) * 2
            for process in [Process(server.url + INTEROP, flavour, ttl=30)]
        }
        script = Path(__file__).with_name("redis_py_process.py")
        words = [sys.executable, script, server.url, name, self.path, self._enough]
        self.old = [subprocess.Popen([str(word) for word in words]) for _ in range(3)]

    async def contend(self) -> list[RecordedHold]:
        """The recorded holds of all processes, once they have alternated often enough."""
        ends = now() + SECONDS
        while min(self.meetings().values()) < self.ENOUGH:
            assert now() < ends, f"they hardly met: {self.meetings()}"
            words = {"name": self.name, "seconds": 1.0, "hold": 0.001, "history": str(self.path)}
            asked = (p.ask("contend", process=p.name, **words) for p, _ in self.clients.values())
            await asyncio.gather(*asked)
        self._enough.touch()
        assert [process.wait(SECONDS) for process in self.old] == [0, 0, 0]
        return read_holds(self.path)

    def meetings(self) -> Counter[tuple[str, str]]:
        """How often a hold of one kind follows one of the other kind."""
        holds = read_holds(self.path) if self.path.exists() else []
        kinds = [self.clients[h.process][1] if h.process in self.clients else "old" for h in holds]
        found = Counter({(a, b): 0 for kind in Flavour for a, b in (("old", kind), (kind, "old"))})
        found.update(pair for pair in pairwise(kinds) if pair in found)
        return found

    def close(self) -> None:
        for process, _ in self.clients.values():
            process.close()
        for old in self.old:
            old.kill()
            old.wait()


@pytest.mark.faults
def test_no_overlap_between_processes_with_redis_py_and_holdfast(
    servers: Servers, tmp_path: Path
) -> None:
    """Each process records its holds, on one clock; both clients and redis-py's Lock alternate."""
    with closing(Contenders(servers.of(RedisServer), _name(), tmp_path)) as contenders:
        holds = asyncio.run(contenders.contend())
    assert faults(holds) == []
    assert len({hold.process for hold in holds}) == len(contenders.clients) + len(contenders.old)


def test_interop_has_fewer_guarantees() -> None:
    store = open_store("redis://localhost" + INTEROP, Settings())
    missing = {Guarantee.FIFO, Guarantee.SHARED, Guarantee.SLOTS}
    assert not store.guarantees & missing
    assert Guarantee.FENCED in store.guarantees


def test_interop_on_a_cluster_refuses_names_of_another_slot(servers: Servers) -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        assert isinstance(await peer.attempt(bench.claim(_name())), Grant)
        with pytest.raises(Unsupported, match="redis-py"):
            await peer.attempt(bench.claim("{user}:1"))

    over(servers.of(RedisCluster).url + INTEROP, Flavour.BLOCKING, body)


def _tried_again(cluster: RedisCluster) -> int:
    """The number of TRYAGAIN replies of all nodes."""
    lines = [
        line
        for node in cluster.nodes
        for line in str(node.ask("INFO", "errorstats")).splitlines()
        if line.startswith("errorstat_TRYAGAIN:count=")
    ]
    return sum(int(line.partition("=")[2]) for line in lines)


@blocking_and_asyncio
def test_a_shared_name_moves_in_two_pieces(
    servers: Servers, namespace: str, flavour: Flavour
) -> None:
    """Its two keys are on two nodes for a while, which reply TRYAGAIN: requests are repeated, and
    the state is unchanged."""
    cluster, name = servers.of(RedisCluster), _name()

    async def main() -> None:
        options = {"namespace": namespace, "ttl": 60, "timeout": SECONDS}
        async with clients(cluster.url + INTEROP, flavour, 2, **options) as (ours, theirs):
            lease = await ours.lock(name).acquire()
            slot = Slot(cluster, name)
            slot.begin()
            slot.move(f"{namespace}:{{{name}}}")
            before = _tried_again(cluster)
            coming = asyncio.create_task(theirs.lock(name).acquire())
            await until(lambda: _tried_again(cluster) > before)
            before = _tried_again(cluster)
            ending = asyncio.create_task(lease.release())
            await until(lambda: _tried_again(cluster) >= before + 4)
            assert not coming.done()
            assert not ending.done()
            slot.move()
            slot.end()
            assert await ending is True
            later = await coming
            assert later.token > lease.token
            assert await later.release() is True

    asyncio.run(main())


@blocking_and_asyncio
def test_a_name_that_is_stuck_keeps_no_other_from_being_renewed(
    servers: Servers, flavour: Flavour
) -> None:
    """A batch has a reply for every name except the one whose slot is being moved."""
    cluster, name = servers.of(RedisCluster), _name()
    other = next(each for each in iter(_name, "") if key_slot(each) != key_slot(name))

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        stuck, free = await peer.take(bench.claim(name)), await peer.take(bench.claim(other))
        slot = Slot(cluster, name)
        slot.begin()
        slot.move(f"{bench.namespace}:{{{name}}}")
        renewed = await peer.renew([stuck, free])
        assert (renewed.lost, set(renewed.unknown)) == ({}, {stuck.claim.owner})
        slot.move()
        slot.end()
        assert await peer.renew([stuck, free]) == ({}, {}, frozenset(), None)
        assert await peer.release(stuck)
        assert await peer.release(free)

    over(cluster.url + INTEROP, flavour, body)
