"""What is peculiar to Redlock: its URL, its nodes, their votes and their quarantine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

import holdfast
from harnesses.redlock import mark_as_new
from holdfast.core.contract import Settings
from holdfast.errors import GuaranteeNotMet, LockTimeout, Unsupported
from holdfast.url import open_store
from servers.ensemble import Ensemble
from servers.process import wait_until
from servers.proxy import Proxy
from servers.redis import RedisServer

SOON = 30.0


@pytest.fixture
def nodes() -> Iterator[Ensemble[RedisServer]]:
    """Three masters that keep nothing."""
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
def test_what_can_t_be_is_refused(hosts: str, reason: str) -> None:
    """Before anything touches the network, with the reason."""
    with pytest.raises(ValueError, match=reason):
        open_store(f"redlock://{hosts}", Settings())


def test_a_ttl_beyond_the_quarantine_is_refused() -> None:
    """A hold that outlives the quarantine could meet another one."""
    with holdfast.connect("redlock://a,b,c?max_ttl=20", ttl=10) as locks:
        with pytest.raises(ValueError, match="20"):
            locks.lock("name", ttl=21)
        locks.lock("name", ttl=20)


def test_a_replica_is_refused(nodes: Ensemble[RedisServer]) -> None:
    """A replica is no vote of its own."""
    with RedisServer(replica_of=nodes.nodes[0]) as replica:
        replica.wait_linked()
        hosts = ",".join(f"{n.host}:{n.port}" for n in (*nodes.nodes[:2], replica))
        with (
            holdfast.connect(f"redlock://{hosts}") as locks,
            pytest.raises(GuaranteeNotMet, match="is a replica"),
        ):
            locks.lock("name").acquire(timeout=SOON)


def test_one_server_twice_is_refused(nodes: Ensemble[RedisServer]) -> None:
    """Behind two names may be one server."""
    with Proxy(nodes.nodes[0]) as proxy:
        hosts = f"{nodes.hosts.rpartition(',')[0]},{proxy.server.host}:{proxy.port}"
        with (
            holdfast.connect(f"redlock://{hosts}") as locks,
            pytest.raises(GuaranteeNotMet, match="same server"),
        ):
            locks.lock("name").acquire(timeout=SOON)


def test_new_nodes_grant_nothing_at_first(nodes: Ensemble[RedisServer]) -> None:
    """Until max_ttl is over, or an operator says that they are new."""
    url = f"redlock://{nodes.hosts}?max_ttl=30"
    with holdfast.connect(url, ttl=5) as locks:
        with pytest.raises(LockTimeout, match="grant nothing before"):
            locks.lock("name", timeout=0).__enter__()
        mark_as_new(url)
        with locks.lock("name", timeout=SOON) as lease:
            assert lease.held


def test_a_quarantine_ends(nodes: Ensemble[RedisServer]) -> None:
    """By itself, when nothing can be held any more that was held before."""
    url = f"redlock://{nodes.hosts}?max_ttl=1"
    with holdfast.connect(url, ttl=1) as locks:
        lease = locks.lock("name", timeout=SOON).acquire()
        assert lease is not None
        lease.release()


def test_a_grant_is_one_request_to_each_node(nodes: Ensemble[RedisServer]) -> None:
    """And so is a release, while the nodes agree."""
    mark_as_new(f"redlock://{nodes.hosts}")
    with holdfast.connect(f"redlock://{nodes.hosts}") as locks:
        lock = locks.lock("name")
        with lock:
            pass
        with lock:
            before = [_calls(node) for node in nodes.nodes]
        for _ in range(20):
            with lock:
                pass
        for node, already in zip(nodes.nodes, before, strict=True):
            # The last requests to the slowest node may still be on their way.
            wait_until("the requests", partial(_has_run, node, already + 41))
            assert _calls(node) - already <= 42


def _has_run(server: RedisServer, calls: int) -> bool:
    return _calls(server) >= calls


def _calls(server: RedisServer) -> int:
    """How many scripts a server has run."""
    lines = str(server.ask("INFO", "commandstats")).splitlines()
    (line,) = [line for line in lines if line.startswith("cmdstat_evalsha:")]
    return int(line.split("calls=")[1].split(",")[0])


def test_counters_that_differ_cost_a_second_round(nodes: Ensemble[RedisServer]) -> None:
    """A node whose counter runs ahead: the others are raised to it, and tokens still grow."""
    mark_as_new(f"redlock://{nodes.hosts}")
    with holdfast.connect(f"redlock://{nodes.hosts}") as locks:
        with locks.lock("name") as first:
            pass
        ahead = first.token + 3_600_000_000
        nodes.nodes[0].ask("HSET", "holdfast:redlock:{name}", "c", str(ahead))
        nodes.nodes[1].ask("HSET", "holdfast:redlock:{name}", "c", str(ahead + 7))
        tokens = [first.token]
        for _ in range(4):
            with locks.lock("name") as lease:
                tokens.append(lease.token)
        assert tokens == sorted(set(tokens))
        assert tokens[1] > ahead


def test_a_flushed_script_is_sent_again(nodes: Ensemble[RedisServer]) -> None:
    """SCRIPT FLUSH costs a round trip and nothing else."""
    mark_as_new(f"redlock://{nodes.hosts}")
    with holdfast.connect(f"redlock://{nodes.hosts}") as locks:
        with locks.lock("name") as first:
            for node in nodes.nodes:
                node.ask("SCRIPT", "FLUSH")
        with locks.lock("name") as second:
            assert second.token > first.token


def test_there_are_no_records() -> None:
    """A job that runs once needs a store that remembers."""
    with holdfast.connect("redlock://a,b,c") as locks, pytest.raises(Unsupported):
        locks.once("key")
