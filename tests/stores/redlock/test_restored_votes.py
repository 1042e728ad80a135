"""A node that lost a hold gets it back by a renewal; a hold that ended is never restored."""

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
from stores.redis.helpers import blocking_and_asyncio, over, until
from stores.redlock import helpers
from stores.redlock.helpers import Nodes

three = helpers.three

KINDS: dict[str, Callable[[Bench], Claim]] = {
    "lock": lambda bench: bench.claim(),
    "reader": lambda bench: bench.claim(mode=Mode.SHARED),
    "slots": lambda bench: bench.claim(mode=Mode.SLOTS, weight=2, limit=3),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def _key(bench: Bench) -> str:
    return f"{bench.namespace}:redlock:{{name}}"


def _holds(node: RedisServer, bench: Bench, claim: Claim) -> bool:
    """Whether a node has a hold of this claim."""
    owner = node.ask("HGET", _key(bench), "x")
    return owner == claim.owner or node.ask("HEXISTS", _key(bench), f"h:{claim.owner}") == 1


async def _all_hold(three: Nodes, bench: Bench, claim: Claim) -> None:
    await until(lambda: all(_holds(node, bench, claim) for node in three.nodes))


@pytest.mark.parametrize("forgets", ["the name", "everything"])
@blocking_and_asyncio
def test_a_reader_is_restored_although_others_acquire_and_release(
    three: Nodes, flavour: Flavour, forgets: str
) -> None:
    """One node after the other loses its data: the reader is restored on each, whether or not the
    other readers had the vote of that node."""

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
            mark_as_new(three.url)  # otherwise other readers would be refused
        await _all_hold(three, bench, grant.claim)
        assert await ours.release(grant)

    over(three.url, flavour, body)


@every_kind
@blocking_and_asyncio
def test_a_released_hold_is_not_restored(three: Nodes, flavour: Flavour, kind: str) -> None:
    """A renewal after the release restores nothing, not even on a node that had lost the hold."""

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
        # The last node may not have executed the renewal yet: another round comes after it.
        await peer.renewer.run(peer.renewer.backend._call(*_look(peer)))  # type: ignore[attr-defined]
        assert not any(_holds(node, bench, grant.claim) for node in three.nodes)

    over(three.url, flavour, body)


def _look(peer: Peer) -> tuple[Any, bytes, Any]:
    """Return a request to all nodes that waits for every answer."""
    backend: Any = peer.backend
    script = backend._scripts.look
    return script, backend._packed(script, "name", "1"), wait_for_all


@every_kind
@blocking_and_asyncio
def test_a_revoked_hold_is_not_restored(three: Nodes, flavour: Flavour, kind: str) -> None:
    """A renewal is refused also by nodes that no longer had the hold."""

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
def test_a_restored_vote_outlasts_the_undo_of_an_earlier_attempt(
    three: Nodes, flavour: Flavour, kind: str
) -> None:
    """The undo may reach a node long after a later attempt was granted."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        backend: Any = peer.backend
        earlier = backend.store.next_stamp()
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
def test_a_node_that_undid_an_earlier_attempt_restores_the_hold(
    three: Nodes, flavour: Flavour
) -> None:
    """A node remembers the undo, and refuses attempts that were sent before it only."""

    async def body(bench: Bench) -> None:
        peer, claim = bench.peer(), bench.claim()
        backend: Any = peer.backend
        undo = backend._undo_command(claim, backend.store.next_stamp(), "-")
        await peer.run(backend._call(backend._scripts.undo, undo, wait_for_all))
        grant = await peer.take(claim)
        await _all_hold(three, bench, claim)
        three.nodes[2].ask("HDEL", _key(bench), "x")
        assert not (await peer.renew([grant])).lost
        await _all_hold(three, bench, claim)

    over(three.url, flavour, body)


@blocking_and_asyncio
def test_a_reader_that_attempts_again_gets_the_same_token(three: Nodes, flavour: Flavour) -> None:
    """Its first answer was lost. A waiting writer does not refuse the second attempt."""

    async def body(bench: Bench) -> None:
        ours, theirs, claim = bench.peer(), bench.peer(), bench.claim(mode=Mode.SHARED)
        grant = await ours.take(claim)
        await theirs.queue(bench.claim())
        for peer in (ours, bench.peer()):
            assert (await peer.take(claim)).token == grant.token

    over(three.url, flavour, body)


@blocking_and_asyncio
def test_a_failed_attempt_of_a_holder_does_not_end_its_hold(three: Nodes, flavour: Flavour) -> None:
    """The nodes have the hold under different tokens, and the second round fails."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        grant = await peer.take(bench.claim())
        await _all_hold(three, bench, grant.claim)
        for number, node in enumerate(three.nodes):
            node.ask("HSET", _key(bench), "xt", str(grant.token + number))
        backend: Any = peer.backend
        backend._scripts.raises = Script("return 0", ("state",), 2)
        assert isinstance(await peer.attempt(grant.claim), Busy)
        await peer.run(backend._call(*_look(peer)))  # executed after any undo
        assert all(_holds(node, bench, grant.claim) for node in three.nodes)

    over(three.url, flavour, body)


@blocking_and_asyncio
def test_a_node_that_became_a_replica_is_left_out(three: Nodes, flavour: Flavour) -> None:
    """The client finds this out during a round, when the connection breaks: the other nodes decide
    this round and all later ones."""

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
