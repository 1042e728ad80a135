"""Grants, tokens and releases of a name that is held alone."""

from __future__ import annotations

import asyncio

from holdfast.claim import Busy, Grant
from holdfast.core.contract import Guarantee
from holdfast.testing.contract.bench import Bench, contract
from holdfast.testing.contract.names import DISTINCT_NAMES
from holdfast.testing.guarantees import expected_guarantees, expected_knobs

__all__: list[str] = []


@contract.rule()
async def declares_what_the_table_says(bench: Bench) -> None:
    """A store's guarantees and its harness's knobs are those of the frozen table."""
    store = bench.peer().store
    assert store.guarantees == expected_guarantees(bench.harness, store.guarantees)
    assert bench.harness.knobs == expected_knobs(bench.harness)
    assert {Guarantee.EXCLUSIVE, Guarantee.FENCED} <= store.guarantees
    assert store.shortest_ttl <= bench.harness.ttl <= store.longest_ttl


@contract.rule()
async def a_free_name_is_granted(bench: Bench) -> None:
    """An uncontended attempt is granted, with the claim that was made and a positive token."""
    peer, claim = bench.peer(), bench.claim()
    grant = await peer.take(claim)
    assert grant.claim == claim
    assert 0 < grant.token < 2**63
    assert grant.slots == ()


@contract.rule()
async def tokens_grow(bench: Bench) -> None:
    """Every hold of a name has a higher token than all before it, whichever process asks."""
    peers = [bench.peer(), bench.peer()]
    tokens = []
    for turn in range(8):
        peer = peers[turn % 2]
        grant = await peer.take(bench.claim())
        assert await peer.release(grant)
        tokens.append(grant.token)
    assert tokens == sorted(set(tokens))


@contract.rule()
async def a_held_name_is_busy(bench: Bench) -> None:
    """While one holds the name nobody else is granted it, joining or not."""
    ours, theirs = bench.peer(), bench.peer()
    await ours.take(bench.claim())
    for join in (False, True):
        assert isinstance(await theirs.attempt(bench.claim(), join=join), Busy)
        assert isinstance(await ours.attempt(bench.claim(), join=join), Busy)


@contract.rule()
async def only_one_of_many_gets_it(bench: Bench) -> None:
    """Many attempts at the same time on a free name give one grant."""
    peers = [bench.peer() for _ in range(4)]
    attempts = [peer.attempt(bench.claim(), join=False) for peer in peers for _ in range(4)]
    answers = await asyncio.gather(*attempts)
    assert sum(isinstance(answer, Grant) for answer in answers) <= 1
    assert isinstance(await peers[0].attempt(bench.claim("other")), Grant)


@contract.rule()
async def not_joining_leaves_no_trace(bench: Bench) -> None:
    """A claim that does not fit and does not join is forgotten at once."""
    ours, theirs = bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    assert isinstance(await theirs.attempt(bench.claim(), join=False), Busy)
    assert (await ours.look("name")).waiters == ()
    assert await ours.release(grant)
    await ours.take(bench.claim())


@contract.rule()
async def an_owner_gets_the_same_grant_again(bench: Bench) -> None:
    """A retry whose first answer was lost gets the same token, from either backend."""
    peer, claim = bench.peer(), bench.claim()
    first = await peer.take(claim)
    assert (await peer.take(claim)).token == first.token
    assert (await peer.renewer.take(claim)).token == first.token
    info = await peer.look("name")
    assert [holder.token for holder in info.holders] == [first.token]


@contract.rule()
async def release_says_whether_it_was_ours(bench: Bench) -> None:
    """The first release of a hold answers yes, every later one no."""
    peer = bench.peer()
    grant = await peer.take(bench.claim())
    assert await peer.release(grant) is True
    assert await peer.release(grant) is False
    assert (await peer.look("name")).holders == ()


@contract.rule()
async def nobody_releases_another_s_hold(bench: Bench) -> None:
    """A late release of an old hold does not touch the new holder."""
    ours, theirs = bench.peer(), bench.peer()
    old = await ours.take(bench.claim())
    assert await ours.release(old)
    new = await theirs.take(bench.claim())
    assert await ours.release(old) is False
    assert isinstance(await ours.attempt(bench.claim(), join=False), Busy)
    assert await theirs.release(new) is True


@contract.rule()
async def the_renewer_releases_what_the_client_took(bench: Bench) -> None:
    """A grant is plain data: the backend beside it can end the hold, and the next one gets it."""
    peer, next_one = bench.peer(), bench.peer()
    grant = await peer.take(bench.claim())
    assert await peer.renewer.release(grant) is True
    assert await peer.release(grant) is False
    await next_one.take(bench.claim())


@contract.rule()
async def names_do_not_touch(bench: Bench) -> None:
    """Any text is a name, and names that differ at all are different locks."""
    peer = bench.peer()
    for name in DISTINCT_NAMES:
        await peer.take(bench.claim(name))
    for name in DISTINCT_NAMES:
        assert isinstance(await peer.attempt(bench.claim(name), join=False), Busy)
        assert [holder.mode for holder in (await peer.look(name)).holders] == ["exclusive"]


@contract.rule()
async def namespaces_do_not_touch(bench: Bench) -> None:
    """The same name in another namespace is another lock, and is not listed."""
    ours = bench.peer()
    await ours.take(bench.claim())
    for namespace in (bench.namespace + "x", bench.namespace + ":a.b", bench.namespace.upper()):
        theirs = bench.peer(namespace=namespace)
        assert await theirs.survey() == []
        await theirs.take(bench.claim())
