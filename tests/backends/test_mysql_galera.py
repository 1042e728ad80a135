"""A Galera node: lease rows work there and say how waiters are woken; named locks are refused."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import asyncmy
import pymysql
import pytest

import holdfast
from backends.claims import claim_of
from backends.mysql_bench import open_admin, peers, rows
from fencing.accounts import mysql_settings
from holdfast.errors import Unsupported
from holdfast.sql import transaction_lock
from holdfast.testing import Flavour
from servers.missing import ServerMissing
from servers.mysql import MySQLServer
from servers.ports import free_port
from servers.registry import Servers

LIBRARY = Path("/usr/lib/galera/libgalera_smm.so")


class GaleraServer(MySQLServer):
    """A cluster of one node, which is a cluster."""

    def __init__(self) -> None:
        if not LIBRARY.exists():
            raise ServerMissing("Galera", "galera-4")
        super().__init__()
        self.arguments += ["--wsrep-on=ON", f"--wsrep-provider={LIBRARY}", "--binlog-format=ROW"]
        self.arguments += ["--wsrep-cluster-address=gcomm://", "--innodb-autoinc-lock-mode=2"]
        group, transfer = free_port(), free_port()
        channel = f"gmcast.listen_addr=tcp://{self.host}:{group}"
        options = f"{channel};ist.recv_addr={self.host}:{transfer}"
        self.arguments += [f"--wsrep-node-address={self.host}:{group}"]
        self.arguments += [f"--wsrep-provider-options={options}"]


@pytest.fixture
def server(servers: Servers) -> GaleraServer:
    return servers.of(GaleraServer)


def test_named_locks_are_refused(server: GaleraServer, namespace: str) -> None:
    """They would lock one node of several."""
    locks = holdfast.connect(f"{server.url}?mode=advisory", namespace=namespace)
    with pytest.raises(Unsupported, match="Galera"):
        locks.lock("name").acquire(timeout=0)
    locks.close()


def test_a_lock_in_a_transaction_is_refused(server: GaleraServer, namespace: str) -> None:
    """Two transactions on two nodes would both have it, until one of them fails at its commit."""
    settings = mysql_settings(server.url)
    with pymysql.connect(**settings) as connection, pytest.raises(Unsupported, match="Galera"):
        transaction_lock(connection, "name", namespace=namespace)

    async def body() -> None:
        async with asyncmy.connect(**settings) as connection:
            with pytest.raises(Unsupported, match="Galera"):
                await transaction_lock(connection, "name", namespace=namespace, timeout=1)

    asyncio.run(body())


def test_lease_rows_work_and_say_how_they_wait(server: GaleraServer, namespace: str) -> None:
    """Ten hand-overs between two doors, by looking; ``check`` and ``inspect`` say so."""
    with (
        holdfast.connect(server.url, namespace=namespace) as ours,
        holdfast.connect(server.url, namespace=namespace) as theirs,
    ):
        findings = {finding.subject: finding for finding in ours.check()}
        assert findings["waiting"].level == "warning"
        assert "Galera" in findings["waiting"].detail
        doors = [ours, theirs]
        lease = ours.lock("name").acquire()
        for turn in range(10):
            assert lease is not None
            got: list[holdfast.Lease | None] = []
            taker = doors[(turn + 1) % 2]
            thread = threading.Thread(
                target=lambda taker=taker, got=got: got.append(
                    taker.lock("name").acquire(timeout=4)
                )
            )
            thread.start()
            while not ours.inspect("name").notice:  # once the waiter has hung its bell
                threading.Event().wait(0.01)
            assert "Galera" in ours.inspect("name").notice
            assert lease.release()
            thread.join()
            assert got[0] is not None
            assert got[0].token > lease.token
            lease = got[0]
        assert lease is not None
        lease.release()


@pytest.mark.parametrize("how", ["release", "revoke"])
def test_who_ends_a_hold_leaves_the_line_as_it_is(
    server: GaleraServer, namespace: str, how: str
) -> None:
    """Also if its own door never waited: that the others can't be found here does not mean that
    they are gone. The first of them is called, and nobody is skipped."""
    with peers(namespace, Flavour.BLOCKING, *[server.url] * 4) as (holder, *waiters):
        held, asked = holder.take(), [claim_of() for _ in waiters]
        for waiter, claim in zip(waiters, asked, strict=True):
            waiter.stand(claim)
        backend = holder.backend
        work = backend.release(held) if how == "release" else backend.revoke("name")
        assert holder.do(work)
        with open_admin(server) as admin:
            row = "SELECT crowd FROM holdfast_lock WHERE namespace = %s"
            ((crowd,),) = rows(admin, row, namespace)
    line = [entry.split(" ") for entry in crowd.decode().splitlines()]
    assert [entry[0] for entry in line] == [claim.owner for claim in asked]
    assert [entry[5] != "-" for entry in line] == [True, False, False]
