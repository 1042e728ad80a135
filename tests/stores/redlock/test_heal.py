"""What a Redlock node knows of a hold that it forgot, or that ended: healed while it is held, gone
for good afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from harnesses.redlock import mark_as_new
from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.stores.redis.scripts import Script
from holdfast.stores.redlock.votes import wait_for_all
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench, Peer
from servers.redis import RedisServer
from stores.redis.bench import blocking_and_asyncio, over, until
from stores.redlock import bench as redlock_bench
from stores.redlock.bench import Nodes

three = redlock_bench.three

KINDS: dict[str, Callable[[Bench], Claim]] = {
    "lock": lambda bench: bench.claim(),
    "reader": lambda bench: bench.claim(mode=Mode.SHARED),
    "slots": lambda bench: bench.claim(mode=Mode.SLOTS, weight=2, limit=3),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def _key(bench: Bench) -> str:
    return f"{bench.namespace}:redlock:{{name}}"


def _holds(node: RedisServer, bench: Bench, claim: Claim) -> bool:
    """Whether a node knows that this one holds."""
    owner = node.ask("HGET", _key(bench), "x")
    return owner == claim.owner or node.ask("HEXISTS", _key(bench), f"h:{claim.owner}") == 1


async def _all_hold(three: Nodes, bench: Bench, claim: Claim) -> None:
    await until(lambda: all(_holds(node, bench, claim) for node in three.nodes))


@pytest.mark.parametrize("forgets", ["the name", "everything"])
@blocking_and_asyncio
def test_a_reader_is_healed_where_others_come_and_go(
    three: Nodes, flavour: Flavour, forgets: str
) -> None:
    """Whether or not those others had the vote of a node that forgot it: one node after the other
    may forget, and nothing is lost."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        grant = await ours.take(bench.claim(mode=Mode.SHARED))
        for node in three.nodes:
            await _all_hold(three, bench, grant.claim)
            node.ask(*(("DEL", _key(bench)) if forgets == "the name" else ("FLUSHALL",)))
            other = await theirs.take(bench.claim(mode=Mode.SHARED))
            assert await theirs.release(other)
            renewal = await ours.renew([grant])
            assert not renewal.lost
            assert not renewal.unknown
            mark_as_new(three.url)  # else those others could not come any more
        await _all_hold(three, bench, grant.claim)
        assert await ours.release(grant)

    over(three.url, flavour, body)


@every_kind
@blocking_and_asyncio
def test_what_was_released_is_not_brought_back(three: Nodes, flavour: Flavour, kind: str) -> None:
    """By a renewal that comes behind the release; not even by a node that had forgotten it."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        others = [await peer.take(KINDS[kind](bench))] if kind == "reader" else []
        grant = await peer.take(KINDS[kind](bench))
        await _all_hold(three, bench, grant.claim)
        three.nodes[2].ask("HDEL", _key(bench), "x", f"h:{grant.claim.owner}")
        assert await peer.release(grant)
        await until(lambda: not any(_holds(node, bench, grant.claim) for node in three.nodes))
        renewal = await peer.renew([grant, *others])
        assert list(renewal.lost) == [grant.claim.owner]
        # The votes of the last node may still be on their way: another round is behind them.
        await peer.renewer.run(peer.renewer.backend._call(*_look(peer)))  # type: ignore[attr-defined]
        assert not any(_holds(node, bench, grant.claim) for node in three.nodes)

    over(three.url, flavour, body)


def _look(peer: Peer) -> tuple[Any, bytes, Any]:
    """A question to all nodes, whose answers are waited for."""
    backend: Any = peer.backend
    script = backend._scripts.look
    return script, backend._packed(script, "name", "1"), wait_for_all


@every_kind
@blocking_and_asyncio
def test_what_was_broken_is_not_brought_back(three: Nodes, flavour: Flavour, kind: str) -> None:
    """Also by those who have no vote in it any more."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        grants = [await ours.take(KINDS[kind](bench))]
        if kind == "reader":
            grants.append(await ours.take(KINDS[kind](bench)))
            for node in three.nodes:
                await until(lambda node=node: node.ask("HGET", _key(bench), "n") == "2")  # type: ignore[misc]
                node.ask("HDEL", _key(bench), f"h:{grants[1].claim.owner}")
        await theirs.revoke("name")
        renewal = await ours.renew(grants)
        assert set(renewal.lost) == {grant.claim.owner for grant in grants}

    over(three.url, flavour, body)


@every_kind
@blocking_and_asyncio
def test_a_healed_vote_outlasts_the_undo_command_of_an_earlier_attempt(
    three: Nodes, flavour: Flavour, kind: str
) -> None:
    """Which may reach a node long after a later attempt has won."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        backend: Any = peer.backend
        earlier = backend._next_stamp()
        grant = await peer.take(KINDS[kind](bench))
        for node in three.nodes[1:]:
            await _all_hold(three, bench, grant.claim)
            node.ask("DEL", _key(bench))
            await peer.renew([grant])
        await _all_hold(three, bench, grant.claim)
        undo = backend._undo_command(grant.claim, earlier, "-")
        await peer.run(backend._call(backend._scripts.undo, undo, wait_for_all))
        assert all(_holds(node, bench, grant.claim) for node in three.nodes)

    over(three.url, flavour, body)


@blocking_and_asyncio
def test_a_reader_that_asks_again_has_what_it_had(three: Nodes, flavour: Flavour) -> None:
    """Its first answer was lost: the token is the same, and no writer is in the way."""

    async def body(bench: Bench) -> None:
        ours, theirs, claim = bench.peer(), bench.peer(), bench.claim(mode=Mode.SHARED)
        grant = await ours.take(claim)
        await theirs.queue(bench.claim())
        for peer in (ours, bench.peer()):
            assert (await peer.take(claim)).token == grant.token

    over(three.url, flavour, body)


@blocking_and_asyncio
def test_who_holds_and_asks_again_in_vain_holds_on(three: Nodes, flavour: Flavour) -> None:
    """The nodes have it under several tokens, and do not agree on one in a second round."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        grant = await peer.take(bench.claim())
        await _all_hold(three, bench, grant.claim)
        for number, node in enumerate(three.nodes):
            node.ask("HSET", _key(bench), "xt", str(grant.token + number))
        backend: Any = peer.backend
        backend._scripts.raises = Script("return 0", ("state",), 2)
        assert isinstance(await peer.attempt(grant.claim), Busy)
        await peer.run(backend._call(*_look(peer)))  # behind whatever was undone
        assert all(_holds(node, bench, grant.claim) for node in three.nodes)

    over(three.url, flavour, body)


@blocking_and_asyncio
def test_a_node_that_became_a_replica_is_left_out(three: Nodes, flavour: Flavour) -> None:
    """That shows in the midst of a round, as its connection breaks: the others decide it, and
    whatever comes after it."""

    async def body(bench: Bench) -> None:
        peer = bench.peer(proxied=True)
        await peer.look("name")  # opens the connections
        node = peer.store.nodes.members[0]  # type: ignore[attr-defined]
        three.nodes[0].ask("REPLICAOF", master.host, str(master.port))
        three.proxies[0].drop_next_reply()
        three.proxies[2].hold_replies()
        attempt = asyncio.create_task(peer.attempt(bench.claim()))
        await until(lambda: node.down)
        three.proxies[2].let_replies()
        grant = await attempt
        assert isinstance(grant, Grant)
        assert not (await peer.renew([grant])).unknown
        assert await peer.release(grant)
        assert "is a replica" in node.cause
        assert await peer.release(await peer.get(bench.claim()))

    with RedisServer() as master:
        over(three.url, flavour, body, three.proxied_url)
