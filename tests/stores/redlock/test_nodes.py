"""The URL, the nodes, their votes and their quarantine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from harnesses.redlock import mark_as_new
from holdfast.claim import Busy, Claim, Mode
from holdfast.core.contract import Settings
from holdfast.errors import BackendUnavailable, GuaranteeNotMet, LockTimeout, Unsupported
from holdfast.io.clock import now
from holdfast.stores.redis.replies import ReasonLog
from holdfast.stores.redlock.scripts import RUN_KEY
from holdfast.testing import Flavour
from holdfast.url import open_store
from servers.ensemble import Ensemble
from servers.proxy import Proxy
from servers.redis import RedisServer
from stores.client_runner import run_with_clients
from stores.redis.helpers import blocking_and_asyncio, until
from stores.redlock import helpers
from stores.redlock.helpers import KEY, Nodes

SOON = 30.0
three = helpers.three


@pytest.fixture
def nodes() -> Iterator[Ensemble[RedisServer]]:
    """Three masters without persistence."""
    with Ensemble([RedisServer() for _ in range(3)]) as ensemble:
        yield ensemble


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ("a,b", "use 3, 5 or 7"),
        ("a,b,c,d", "survives no more failures than with 3"),
        ("a", "not 1"),
        ("a,b,c,d,e,f,g,h,i", "not 9"),
        ("a,b,a", "twice"),
        ("a,b,c?max_ttl=0", "more than 0"),
        ("a,b,c?loss_protection=off&max_ttl=5", "belongs to"),
        ("a,b,c?colour=red", "no option"),
    ],
)
def test_an_invalid_url_is_refused(hosts: str, reason: str) -> None:
    """With the reason, and without network access."""
    with pytest.raises(ValueError, match=reason):
        open_store(f"redlock://{hosts}", Settings())


def test_a_ttl_beyond_the_quarantine_is_refused() -> None:
    """A hold that outlives the quarantine could overlap with another one."""
    with holdfast.connect("redlock://a,b,c?max_ttl=20", ttl=10) as locks:
        with pytest.raises(ValueError, match="20"):
            locks.lock("name", ttl=21)
        locks.lock("name", ttl=20)


@blocking_and_asyncio
def test_a_replica_is_refused(nodes: Ensemble[RedisServer], flavour: Flavour) -> None:
    """A replica has no vote of its own."""
    with RedisServer(replica_of=nodes.nodes[0]) as replica:
        replica.wait_linked()
        hosts = ",".join(f"{n.host}:{n.port}" for n in (*nodes.nodes[:2], replica))
        _refused(f"redlock://{hosts}", flavour, "is a replica")


@blocking_and_asyncio
def test_one_server_twice_is_refused(nodes: Ensemble[RedisServer], flavour: Flavour) -> None:
    """Two addresses may be the same server."""
    with Proxy(nodes.nodes[0]) as proxy:
        hosts = f"{nodes.hosts.rpartition(',')[0]},{proxy.server.host}:{proxy.port}"
        _refused(f"redlock://{hosts}", flavour, "same server")


def _refused(url: str, flavour: Flavour, reason: str) -> None:
    """Every acquire raises the error, not only the first."""

    async def body(client: Any) -> None:
        for _ in range(2):
            with pytest.raises(GuaranteeNotMet, match=reason):
                await client.lock("name").acquire(timeout=SOON)

    run_with_clients(flavour, body, url)


@blocking_and_asyncio
def test_new_nodes_grant_nothing_at_first(nodes: Ensemble[RedisServer], flavour: Flavour) -> None:
    """Until max_ttl is over, or an operator marks them as new."""
    url = f"redlock://{nodes.hosts}?max_ttl=30"

    async def body(client: Any) -> None:
        with pytest.raises(LockTimeout, match="grant nothing before"):
            async with client.lock("name", timeout=0):
                pass
        mark_as_new(url)
        async with client.lock("name", timeout=SOON) as lease:
            assert lease.held

    run_with_clients(flavour, body, url, ttl=5)


@blocking_and_asyncio
def test_a_quarantine_ends(nodes: Ensemble[RedisServer], flavour: Flavour) -> None:
    """Without help, when every earlier hold must have expired."""

    async def body(client: Any) -> None:
        lease = await client.lock("name", timeout=SOON).acquire()
        assert lease is not None
        await lease.release()

    run_with_clients(flavour, body, f"redlock://{nodes.hosts}?max_ttl=1", ttl=1)


@blocking_and_asyncio
def test_a_grant_is_one_request_to_each_node(
    nodes: Ensemble[RedisServer], flavour: Flavour
) -> None:
    """A release is one request too, while the counters of the nodes agree."""
    mark_as_new(f"redlock://{nodes.hosts}")

    async def body(client: Any) -> None:
        lock = client.lock("name")
        async with lock:
            pass
        async with lock:
            before = [_calls(node) for node in nodes.nodes]
        for _ in range(20):
            async with lock:
                pass
        for node, already in zip(nodes.nodes, before, strict=True):
            # The last requests to the slowest node may still be in flight.
            await until(lambda n=node, a=already: _calls(n) >= a + 41)  # type: ignore[misc]
            assert _calls(node) - already <= 42

    run_with_clients(flavour, body, f"redlock://{nodes.hosts}")


def _calls(server: RedisServer) -> int:
    """Count the scripts that a server has run."""
    lines = str(server.ask("INFO", "commandstats")).splitlines()
    (line,) = [line for line in lines if line.startswith("cmdstat_evalsha:")]
    return int(line.split("calls=")[1].split(",")[0])


@blocking_and_asyncio
def test_counters_that_differ_cost_a_second_round(
    nodes: Ensemble[RedisServer], flavour: Flavour
) -> None:
    """The counter of one node is ahead: the others are raised to it, and tokens still grow."""
    mark_as_new(f"redlock://{nodes.hosts}")

    async def body(client: Any) -> None:
        async with client.lock("name") as first:
            pass
        ahead = first.token + 3_600_000_000
        nodes.nodes[0].ask("HSET", KEY, "c", str(ahead))
        nodes.nodes[1].ask("HSET", KEY, "c", str(ahead + 7))
        tokens = [first.token]
        for _ in range(4):
            async with client.lock("name") as lease:
                tokens.append(lease.token)
        assert tokens == sorted(set(tokens))
        assert tokens[1] > ahead

    run_with_clients(flavour, body, f"redlock://{nodes.hosts}")


@blocking_and_asyncio
def test_a_flushed_script_is_sent_again(nodes: Ensemble[RedisServer], flavour: Flavour) -> None:
    """SCRIPT FLUSH costs a round trip and nothing else."""
    mark_as_new(f"redlock://{nodes.hosts}")

    async def body(client: Any) -> None:
        first = await client.lock("name").acquire()
        for node in nodes.nodes:
            node.ask("SCRIPT", "FLUSH")
        assert await first.release() is True
        for node in nodes.nodes:
            node.ask("SCRIPT", "FLUSH")
        second = await client.lock("name").acquire(blocking=False)
        assert second.token > first.token
        assert await second.release() is True

    run_with_clients(flavour, body, f"redlock://{nodes.hosts}")


@blocking_and_asyncio
def test_seven_nodes_survive_the_loss_of_three(flavour: Flavour) -> None:
    """Without a fourth node nothing is granted."""

    async def body(ours: Any, theirs: Any) -> None:
        async with ours.lock("name") as first:
            assert await theirs.lock("name").acquire(blocking=False) is None
            for node in seven.nodes[:3]:
                node.kill()
            await first.extend()
            assert await theirs.lock("name").acquire(blocking=False) is None
        async with theirs.lock("name", timeout=SOON) as second:
            assert second.token > first.token
        seven.nodes[3].kill()
        with pytest.raises(BackendUnavailable, match="needs 4 of 7 nodes"):
            await ours.lock("name", timeout=0).acquire()

    with Nodes(7) as seven:
        run_with_clients(flavour, body, seven.url, seven.url)


def test_there_are_no_records() -> None:
    """A job that runs once needs a store with records."""
    with holdfast.connect("redlock://a,b,c") as locks, pytest.raises(Unsupported):
        locks.once("key")


@blocking_and_asyncio
def test_a_check_names_the_nodes_that_grant_nothing(
    nodes: Ensemble[RedisServer], flavour: Flavour
) -> None:
    """Before the first request, after it, and no longer once they are marked as new."""
    url = f"redlock://{nodes.hosts}?max_ttl=300"

    async def body(client: Any) -> None:
        async def paused() -> list[str]:
            findings = await client.check()
            deadline = now() + SOON
            # A stall of the machine may have cost a node its connection, which is opened again.
            while any("no answer" in each.detail for each in findings) and now() < deadline:
                findings = await client.check()
            return [each.detail for each in findings if each.detail.startswith("it grants nothing")]

        assert ["for 300 s from the next" in detail for detail in await paused()] == [True] * 3
        assert await client.lock("name").acquire(timeout=0) is None
        await until(lambda: all(node.ask("EXISTS", RUN_KEY) for node in nodes.nodes))
        assert ["grants nothing before" in detail for detail in await paused()] == [True] * 3
        assert all("holdfast init" in detail for detail in await paused())
        mark_as_new(url)
        assert await paused() == []
        nodes.nodes[1].ask("FLUSHALL")
        assert len(await paused()) == 1

    run_with_clients(flavour, body, url)


@blocking_and_asyncio
def test_what_an_operator_asks_waits_for_a_slow_node(three: Nodes, flavour: Flavour) -> None:
    """``check()`` and ``holdfast init``: no decision of a quorum ends their rounds."""

    async def body(client: Any) -> None:
        await client.inspect("other")  # opens the connections
        three.proxies[2].delay(0.15)
        findings = await client.check()
        assert not [each for each in findings if "no answer" in each.detail]
        assert "3 nodes are marked" in await client._engine.backend.initialise()

    run_with_clients(flavour, body, three.proxied_url)


def test_a_cause_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """However many nodes have it, and whatever time they name."""
    log, claim = ReasonLog(), Claim("name", Mode.EXCLUSIVE, 1, 0, 10.0, "owner", "[]")
    for count, moment in ((2, "10:00:01"), (3, "10:00:02"), (2, "10:00:01")):
        reason = f"{count} of 3 nodes of redlock://a grant nothing before {moment} UTC: emptied"
        log.tell(claim, Busy(0, 1.0, None, reason))
    log.tell(claim, Busy(0, 1.0, None, ""))
    log.tell(claim, Busy(0, 1.0, None, "1 of 2 replicas have it"))
    assert len(caplog.records) == 2
