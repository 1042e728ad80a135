"""A Galera node: lease rows work there and say how waiters are woken; named locks are refused."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import asyncmy
import pymysql
import pytest

import holdfast
from fencing.accounts import mysql_settings
from holdfast.claim import Busy, Grant, Mode
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, Unsupported
from holdfast.fencing.sql.drivers import Answer
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.sql import Asked, transaction_lock
from holdfast.stores.mysql.connect import SKEW_MICROS, Dialler
from holdfast.stores.mysql.protocol import Result
from holdfast.stores.mysql.transaction import take
from holdfast.testing import Flavour
from holdfast.url import parse_url
from servers.missing import ServerMissing
from servers.mysql import MySQLServer
from servers.ports import free_port
from servers.registry import Servers
from stores.claims import claim_of
from stores.mysql.bench import open_admin, peers, rows

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


class Percona:
    """Percona's Galera: there every session has a ``wsrep_on``, and the server has none.

    As its manual says; it was not at hand.
    """

    def request(self, sql: bytes, _: float) -> bytes:
        return sql

    def checked(self, sql: bytes) -> list[Result]:
        facts = {b"version": b"8.0.36-28.1", b"read_only": b"OFF", b"innodb_read_only": b"OFF"}
        if b"GLOBAL" not in sql:
            facts[b"wsrep_on"] = b"ON"
        return [Result(0, 0, list(facts.items()))]

    def close(self) -> None:
        pass

    async def execute(self, sql: str, _: object) -> Answer:
        if "GLOBAL" in sql:
            raise pymysql.OperationalError(1238, "Variable 'wsrep_on' is a SESSION variable")
        return Answer([(1,)], 1, 0)


def test_percona_s_cluster_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.stores.mysql.connect.dial", lambda *_: Percona())
    dialler = Dialler(parse_url("mysql://host/database"), Settings(), "advisory")
    with pytest.raises(Unsupported, match="Galera"):
        dialler.greet(0.0)
    with pytest.raises(Unsupported, match="Galera"):
        run_now(take(Percona(), Asked("name", "namespace", None, "", "")))


def test_lease_rows_work_and_say_how_they_wait(server: GaleraServer, namespace: str) -> None:
    """Ten hand-overs between two clients, by looking; ``check`` and ``inspect`` say so."""
    with (
        holdfast.connect(server.url, namespace=namespace) as ours,
        holdfast.connect(server.url, namespace=namespace) as theirs,
    ):
        findings = {finding.subject: finding for finding in ours.check()}
        assert findings["waiting"].level == "warning"
        assert "Galera" in findings["waiting"].detail
        clients = [ours, theirs]
        lease = ours.lock("name").acquire()
        for turn in range(10):
            assert lease is not None
            got: list[holdfast.Lease | None] = []
            taker = clients[(turn + 1) % 2]
            thread = threading.Thread(
                target=lambda taker=taker, got=got: got.append(
                    taker.lock("name").acquire(timeout=4)
                )
            )
            thread.start()
            while not ours.inspect("name").notice:  # once the waiter has hung its subscription
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
    """Also if its own client never waited: that the others can't be found here does not mean that
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


@pytest.mark.parametrize(("shift", "told"), [(-4.0, "4.0 s ahead of"), (4.0, "4.0 s behind")])
def test_a_node_with_another_clock_is_refused(
    server: GaleraServer, namespace: str, monkeypatch: pytest.MonkeyPatch, shift: float, told: str
) -> None:
    """A hold would end at another time there than on the other nodes."""
    with holdfast.connect(server.url, namespace=namespace) as locks:
        (clock,) = [finding for finding in locks.check() if finding.subject == "clock"]
        assert clock.level == "ok"
    monkeypatch.setattr("holdfast.stores.mysql.connect.wall", lambda: time.time() + shift)
    with (
        holdfast.connect(server.url, namespace=namespace, patience=0.5) as locks,
        pytest.raises(BackendUnavailable, match=f"Galera node whose clock is {told}.*NTP"),
    ):
        locks.lock("name").acquire()


def test_a_clock_that_went_astray_is_told(
    server: GaleraServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``check``, on connections that were opened before."""
    with holdfast.connect(server.url, namespace=namespace) as locks:
        locks.check()
        monkeypatch.setattr(BlockingRuntime, "wall", lambda _: time.time() - 4.0)
        (clock,) = [finding for finding in locks.check() if finding.subject == "clock"]
    assert (clock.level, "4.0" in clock.detail) == ("warning", True)


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.SHARED])
@pytest.mark.parametrize("crowded", [False, True])
def test_a_hold_is_over_once_it_is_by_all_clocks(
    server: GaleraServer,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    mode: Mode,
    crowded: bool,
) -> None:
    """Nodes may be a second apart, ten here: who ran out two seconds ago may hold elsewhere."""
    assert SKEW_MICROS == 1_000_000
    monkeypatch.setattr("holdfast.stores.mysql.connect.SKEW_MICROS", 10_000_000)
    with (
        peers(namespace, Flavour.BLOCKING, *[server.url] * 3) as (holder, waiter, other),
        open_admin(server) as admin,
    ):
        held = holder.do(holder.backend.attempt(claim_of(mode=mode, ttl=600), join=True))
        assert isinstance(held, Grant)
        asked = claim_of()
        if crowded:
            waiter.stand(asked)
        for ago, over in ((2.0, False), (12.0, True)):
            run_out(admin, namespace, held, ago)
            answer = waiter.do(waiter.backend.attempt(asked, join=crowded))
            assert isinstance(answer, Grant) == over
            if isinstance(answer, Busy):
                assert 1.0 < (answer.retry_seconds or 0.0) <= 8.0
                left = other.do(other.backend.look("name")).holders[0].remaining
                assert left == 0


def run_out(admin: Any, namespace: str, held: Grant, ago: float) -> None:
    """Lets a hold end so many seconds ago, in its column or in its line."""
    ends = int((time.time() - ago) * 1_000_000)
    where = f"WHERE namespace = '{namespace}'"
    if held.claim.mode is Mode.EXCLUSIVE:
        rows(admin, f"UPDATE holdfast_lock SET ends = {ends} {where}")
        return
    ((crowd,),) = rows(admin, f"SELECT crowd FROM holdfast_lock {where}")
    first, *others = crowd.decode().splitlines(keepends=True)
    words = first.split(" ")
    words[3] = str(ends)
    line = "".join([" ".join(words), *others]).encode().hex()
    rows(admin, f"UPDATE holdfast_lock SET crowd = X'{line}' {where}")
