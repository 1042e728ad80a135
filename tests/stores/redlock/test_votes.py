"""The rules of a vote: how many nodes renew a hold, and which token is raised."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from holdfast.claim import Mode
from holdfast.stores.redlock.backend import may_arrive_late
from holdfast.stores.redlock.nodes import Round, RoundRequest
from holdfast.stores.redlock.scripts import RedlockScripts
from holdfast.stores.redlock.votes import Ballot
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from servers.redis import RedisServer
from servers.registry import Servers
from stores.redis.helpers import blocking_and_asyncio, over
from stores.redlock.helpers import Nodes, three

__all__ = ["three"]


@blocking_and_asyncio
def test_fewer_nodes_than_a_majority_renew_nothing(three: Nodes, flavour: Flavour) -> None:
    """One node renews, two are down: whether the hold still exists is unknown."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        grant = await peer.take(bench.claim())
        for node in three.nodes[1:]:
            node.kill()
        renewal = await peer.renew([grant])
        assert list(renewal.unknown) == [grant.claim.owner]
        assert "1 nodes renewed it" in renewal.unknown[grant.claim.owner]

    over(three.url, flavour, body)


@blocking_and_asyncio
def test_a_hold_that_most_nodes_gave_away_is_lost(three: Nodes, flavour: Flavour) -> None:
    """One node that still has the hold is not enough."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        grant = await peer.take(bench.claim())
        key = f"{bench.namespace}:redlock:{{name}}"
        for node in three.nodes[1:]:
            node.ask("HDEL", key, "x", "xe", "xt", "xl")
            node.ask("HSET", key, "c", str(grant.token + 1))
        assert list((await peer.renew([grant])).lost) == [grant.claim.owner]

    over(three.url, flavour, body)


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.SHARED, Mode.SLOTS])
def test_only_the_holder_raises_its_token(servers: Servers, namespace: str, mode: Mode) -> None:
    """Never to a lower token: a vote with a higher one may have been lost."""
    server, scripts = servers.of(RedisServer), RedlockScripts(loss_protection=False)
    client = redis.Redis(server.host, server.port)
    key, run = f"{namespace}:redlock:{{name}}", "holdfast:redlock:run"
    limit = 3 if mode is Mode.SLOTS else 0
    kind = {Mode.EXCLUSIVE: "x", Mode.SHARED: "s", Mode.SLOTS: "n"}[mode]
    shape = f"{kind} 1 {limit} 0 60000 {'@0' if limit else '-'}"
    granted = client.eval(scripts.grant.text, 2, key, run, "me", "[]", "1", "30000", "1", shape)
    token = granted[1]

    def raise_to(owner: str, to: int) -> object:
        return client.eval(scripts.raises.text, 1, key, owner, str(to))

    before = client.hgetall(key)
    assert raise_to("another", token + 5) == 0
    assert raise_to("me", token - 1) == 0
    assert client.hgetall(key) == before
    assert raise_to("me", token + 5) == 1
    assert client.hget(key, "c") == str(token + 5).encode()
    looked = client.eval(scripts.look.text, 1, key, "10")
    assert [row[2] for row in looked[2]] == [token + 5]


@pytest.mark.parametrize("shapes", [("x 1 0", "x - 0"), ("s 1 0", "s - 0"), ("n 1 3", "n 0 0")])
def test_a_node_that_gets_a_release_first_gives_no_vote(
    servers: Servers, namespace: str, shapes: tuple[str, str]
) -> None:
    """A stalled node may read a release before the attempt that it ends: they use different
    connections. Other owners are granted, and a later attempt of the same owner too."""
    server, scripts = servers.of(RedisServer), RedlockScripts(loss_protection=False)
    client = redis.Redis.from_url(server.url)
    key, run, (claim, ended) = f"{namespace}:redlock:{{name}}", f"{namespace}:run", shapes

    def grant(owner: str, sent: str) -> Any:
        shape = f"{claim} 0 60000 {'0' if claim[0] == 'n' else '-'}"
        words = (owner, "[]", sent, "30000", sent, shape)
        return client.eval(scripts.grant.text, 2, key, run, *words)

    client.eval(scripts.release.text, 1, key, "me", "1000", f"{namespace}:wake", ended)
    assert grant("me", "1000") == [b"gone"]
    assert grant("another", "1000")[0] == 1
    client.delete(key)
    client.eval(scripts.release.text, 1, key, "me", "1000", f"{namespace}:wake", ended)
    assert grant("me", "1001")[0] == 1
    client.close()


@pytest.mark.parametrize("last", ["undo", "release"])
def test_a_copy_of_an_attempt_that_arrives_late_gives_no_vote(
    servers: Servers, namespace: str, last: str
) -> None:
    """A connection that was given up may deliver an attempt after the request that ended it. A
    later attempt of the same owner is granted."""
    server, scripts = servers.of(RedisServer), RedlockScripts(loss_protection=False)
    client = redis.Redis.from_url(server.url)
    key, run, channel = f"{namespace}:redlock:{{name}}", f"{namespace}:run", f"{namespace}:wake"

    def grant(sent: str) -> Any:
        words = ("me", "[]", sent, "30000", sent, "x 1 0 0 60000 -")
        return client.eval(scripts.grant.text, 2, key, run, *words)

    if last == "undo":
        client.eval(scripts.undo.text, 1, key, "me", "1000", "-")
        assert client.pttl(key) > 0
    else:
        assert grant("1000")[0] == 1
        client.eval(scripts.release.text, 1, key, "me", "1000", channel, "x - 1")
    assert grant("1000") == [b"gone"]
    assert grant("2000")[0] == 1
    client.close()


def test_a_late_undo_does_not_let_a_later_attempt_in(servers: Servers, namespace: str) -> None:
    """Two attempts, each with its undo or abandonment. The abandonment came first, over a new
    connection; the old connection then delivers the undo of the first attempt and the second
    attempt."""
    server, scripts = servers.of(RedisServer), RedlockScripts(loss_protection=False)
    client = redis.Redis.from_url(server.url)
    key, run, channel = f"{namespace}:redlock:{{name}}", f"{namespace}:run", f"{namespace}:wake"
    client.eval(scripts.abandon.text, 1, key, "me", "3000", channel)
    client.eval(scripts.undo.text, 1, key, "me", "1000", "-")

    def grant(sent: str) -> Any:
        words = ("me", "[]", sent, "30000", sent, "x 1 0 0 60000 -")
        return client.eval(scripts.grant.text, 2, key, run, *words)

    assert grant("2000") == [b"gone"]
    assert grant("4000")[0] == 1
    client.close()


@pytest.mark.parametrize(
    ("answers", "resent", "late"),
    [
        ([[[1, 7, b"-", b""]], [[1, 7, b"-", b""]], None], (), False),
        ([[[1, 7, b"-", b""]], [[1, 7, b"-", b""]], OSError()], (), True),
        ([[[1, 7, b"-", b""]], [[1, 7, b"-", b""]], None], (1,), True),
        ([[[1, 7, b"-", b""]], None, None], (), True),
    ],
    ids=["straggler", "broken", "sent twice", "failed"],
)
def test_which_attempts_may_arrive_late(answers: list[Any], resent: tuple[int], late: bool) -> None:
    """Not that of a usual round, which ends before the slowest node has answered: every release
    would have to be remembered."""
    round_ = Round(RoundRequest([b""], lambda at: b"", bool), 3)
    round_.answers, round_.resent = answers, set(resent)
    assert may_arrive_late(round_, Ballot(answers, 2)) is late
