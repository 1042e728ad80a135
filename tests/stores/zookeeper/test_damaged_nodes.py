"""Foreign or damaged nodes where locks are stored. Only node names decide over claims; the data of
nodes matters to inspection only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kazoo.client import KazooClient

import holdfast
from holdfast.core.drive import run_now
from holdfast.errors import Incompatible
from servers.registry import Servers
from stores.zookeeper.helpers import QuickServer


@pytest.fixture
def ensemble(servers: Servers, namespace: str) -> Iterator[holdfast.Locks]:
    with holdfast.connect(servers.of(QuickServer).url, namespace=namespace, ttl=20) as locks:
        yield locks


def test_a_node_with_a_foreign_name(
    ensemble: holdfast.Locks, kazoo: KazooClient, namespace: str
) -> None:
    queues = f"/{namespace}/locks"
    with ensemble.lock("aaa"), ensemble.lock("zzz"):
        for node in ("1.x.by hand", "1.n.1_0.2.0.0000000001", "1.k.x", "1." + "y" * 500):
            kazoo.create(f"{queues}/damaged/{node}", b"x", makepath=True)
            for work in (
                lambda: ensemble.lock("damaged").acquire(blocking=False),
                lambda: ensemble.inspect("damaged"),
            ):
                with pytest.raises(Incompatible, match="'damaged'"):
                    work()
            found = {each.name: each for each in ensemble.list()}
            assert "can't be read" in found["damaged"].notice
            assert len(found["aaa"].holders) == len(found["zzz"].holders) == 1
            kazoo.delete(f"{queues}/damaged/{node}")
        with ensemble.lock("damaged", timeout=0) as lease:
            assert lease.held


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"1_0 0  0\n", b"9" * 5000 + b" 0  0\n" + b"[" * 9999]
)
def test_a_node_with_foreign_data(
    ensemble: holdfast.Locks, kazoo: KazooClient, namespace: str, data: bytes
) -> None:
    """Claims don't read it; inspection raises an error; and it can be revoked."""
    with ensemble.lock("zzz"):
        node = f"/{namespace}/locks/damaged/1.x.1.0.{'0' * 32}."
        kazoo.create(node, data, sequence=True, makepath=True)
        with pytest.raises(Incompatible, match="'damaged'"):
            ensemble.inspect("damaged")
        notices = {each.name: each.notice for each in ensemble.list()}
        assert "can't be read" in notices["damaged"]
        assert notices["zzz"] == ""
        assert run_now(ensemble._engine.backend.revoke("damaged"))
        with ensemble.lock("damaged", timeout=0) as lease:
            assert lease.held


def test_foreign_names_among_the_locks(
    ensemble: holdfast.Locks, kazoo: KazooClient, namespace: str
) -> None:
    with ensemble.lock("A"), ensemble.lock("zzz"):
        for name in ("%41", "%zz", "ä", "\u202ea"):
            kazoo.create(f"/{namespace}/locks/{name}/1.x.1.0.0.0000000001", b"", makepath=True)
        found = ensemble.list()
        assert len([each for each in found if each.notice]) >= 3
        assert any(each.name == "zzz" and each.holders for each in found)


@pytest.mark.parametrize("data", [b"", b"\xff", b"x 1.0\n", b"1 nan\n", b"1 1e400\n"])
def test_a_foreign_record(
    ensemble: holdfast.Locks, kazoo: KazooClient, namespace: str, data: bytes
) -> None:
    with ensemble.lock("warm"):
        pass
    kazoo.create(f"/{namespace}/records/damaged", data, makepath=True)
    backend = ensemble._engine.backend
    with pytest.raises(Incompatible, match="'damaged'"):
        run_now(backend.recall("damaged"))
