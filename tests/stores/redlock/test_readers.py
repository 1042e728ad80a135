"""Many readers of one name on Redlock: what is done to one reads the entry of that one alone."""

from __future__ import annotations

import pytest

from holdfast.claim import Grant, Mode
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from servers.redis import RedisServer
from stores.redis.helpers import blocking_and_asyncio, over, until
from stores.redlock import helpers
from stores.redlock.helpers import Nodes

three = helpers.three


def _full_reads(node: RedisServer) -> int:
    """How often a node has read all fields of a name."""
    lines = str(node.ask("INFO", "commandstats")).splitlines()
    found = [line for line in lines if line.startswith("cmdstat_hgetall:")]
    return int(found[0].split("calls=")[1].split(",")[0]) if found else 0


def _key(bench: Bench) -> str:
    return f"{bench.namespace}:redlock:{{name}}"


@pytest.mark.parametrize("count", [10, 100])
@blocking_and_asyncio
def test_a_reader_does_not_read_the_others(three: Nodes, flavour: Flavour, count: int) -> None:
    """Neither when it is granted, nor renewed, nor released."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        grants = [await peer.take(bench.claim(mode=Mode.SHARED)) for _ in range(count)]
        assert (await peer.renew(grants)).lost == {}
        for node in three.nodes:
            await until(lambda node=node: node.ask("HGET", _key(bench), "n") == str(count))  # type: ignore[misc]
        for grant in grants:
            assert await peer.release(grant)
        assert [_full_reads(node) for node in three.nodes] == [0, 0, 0]
        for node in three.nodes:
            await until(lambda node=node: node.ask("HEXISTS", _key(bench), "n") == 0)  # type: ignore[misc]
        assert isinstance(await peer.attempt(bench.claim()), Grant)

    over(three.url, flavour, body)


@blocking_and_asyncio
def test_readers_that_died_are_read_and_deleted_once(three: Nodes, flavour: Flavour) -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        living = [await peer.take(bench.claim(mode=Mode.SHARED)) for _ in range(10)]
        for node in three.nodes:
            await until(lambda node=node: node.ask("HGET", _key(bench), "n") == "10")  # type: ignore[misc]
            node.ask("HSET", _key(bench), "n", "11", "f", "5", "h:dead", "s 5 5 5 5 - label")
        await peer.renew(living)
        for node in three.nodes:
            await until(lambda node=node: node.ask("HGET", _key(bench), "n") == "10")  # type: ignore[misc]
            assert node.ask("HEXISTS", _key(bench), "h:dead") == 0
            assert _full_reads(node) == 1
        assert not isinstance(await peer.attempt(bench.claim()), Grant)

    over(three.url, flavour, body)


@blocking_and_asyncio
def test_a_renewal_restores_a_reader_whose_entry_is_over(three: Nodes, flavour: Flavour) -> None:
    """A node that missed renewals, and votes again: its vote is stored."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        grant = await peer.take(bench.claim(mode=Mode.SHARED))
        field = f"h:{grant.claim.owner}"
        for node in three.nodes:
            await until(lambda node=node: node.ask("HEXISTS", _key(bench), field) == 1)  # type: ignore[misc]
            words = str(node.ask("HGET", _key(bench), field)).split(" ")
            words[1] = "5"
            node.ask("HSET", _key(bench), field, " ".join(words), "f", "5")
        assert (await peer.renew([grant])).lost == {}
        for node in three.nodes:
            await until(lambda node=node: node.ask("HEXISTS", _key(bench), field) == 1)  # type: ignore[misc]
        assert not isinstance(await peer.attempt(bench.claim()), Grant)

    over(three.url, flavour, body)
