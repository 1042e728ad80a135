"""A Galera node: lease rows work, and report that waiters poll; named locks are refused."""

from __future__ import annotations

import asyncio
import re
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
from holdfast.io.blocking import WORLD
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.sql import TransactionRequest, transaction_lock
from holdfast.stores.mysql.connect import SKEW_MICROS, MySqlDialler
from holdfast.stores.mysql.protocol import Result
from holdfast.stores.mysql.transaction import take
from holdfast.testing import Flavour
from holdfast.url import parse_url
from servers.missing import ServerMissing
from servers.mysql import MySQLServer
from servers.ports import free_port
from servers.registry import Servers
from stores.claims import claim_of
from stores.mysql.helpers import open_admin, peers, rows

LIBRARY = Path("/usr/lib/galera/libgalera_smm.so")


class GaleraServer(MySQLServer):
    """A Galera cluster of one node."""

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
    """A named lock would exist on one node of several."""
    locks = holdfast.connect(f"{server.url}?mode=advisory", namespace=namespace)
    with pytest.raises(Unsupported, match="Galera"):
        locks.lock("name").acquire(timeout=0)
    locks.close()


def test_a_lock_in_a_transaction_is_refused(server: GaleraServer, namespace: str) -> None:
    """Two transactions on two nodes would both hold it, until one of them fails at its commit."""
    settings = mysql_settings(server.url)
    with pymysql.connect(**settings) as connection, pytest.raises(Unsupported, match="Galera"):
        transaction_lock(connection, "name", namespace=namespace)

    async def body() -> None:
        async with asyncmy.connect(**settings) as connection:
            with pytest.raises(Unsupported, match="Galera"):
                await transaction_lock(connection, "name", namespace=namespace, timeout=1)

    asyncio.run(body())


class Percona:
    """Percona's Galera: ``wsrep_on`` is a session variable, and there is no global one.

    According to its manual; no such server was available.
    """

    def __init__(self) -> None:
        self.connection = self

    async def ask(self, sql: bytes) -> bytes:
        return sql

    def checked(self, sql: bytes) -> list[Result]:
        facts = {b"version": b"8.0.36-28.1", b"read_only": b"OFF", b"innodb_read_only": b"OFF"}
        if b"GLOBAL" not in sql:
            facts[b"wsrep_on"] = b"ON"
        return [Result(0, 0, list(facts.items()))]

    def close(self) -> None:
        pass

    async def begun(self) -> bool:
        return False

    async def execute(self, sql: str, _: object) -> Answer:
        if "GLOBAL" in sql:
            raise pymysql.OperationalError(1238, "Variable 'wsrep_on' is a SESSION variable")
        return Answer([(1,)], 1, 0)


def test_percona_s_cluster_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    dial = "holdfast.stores.mysql.connect.dial"
    monkeypatch.setattr(dial, lambda address, world, until, greet: greet(Percona()))
    dialler = MySqlDialler(parse_url("mysql://host/database"), Settings(), "advisory")
    with pytest.raises(Unsupported, match="Galera"):
        run_now(dialler.connect(WORLD, 0.0))
    with pytest.raises(Unsupported, match="Galera"):
        run_now(take(Percona(), TransactionRequest("name", "namespace", None, "", "")))


def test_lease_rows_work_and_report_polling(server: GaleraServer, namespace: str) -> None:
    """Ten changes of the holder between two clients, by polling; ``check`` and ``inspect`` report
    it."""
    with (
        holdfast.connect(server.url, namespace=namespace) as ours,
        holdfast.connect(server.url, namespace=namespace) as theirs,
    ):
        findings = {finding.subject: finding for finding in ours.check()}
        assert findings["waiting"].level == "warning"
        assert "Galera" in findings["waiting"].detail
        clients = [ours, theirs]
        lease = ours.lock("name").acquire()
        for step in range(10):
            assert lease is not None
            got: list[holdfast.Lease | None] = []
            taker = clients[(step + 1) % 2]
            thread = threading.Thread(
                target=lambda taker=taker, got=got: got.append(
                    taker.lock("name").acquire(timeout=4)
                )
            )
            thread.start()
            while not ours.inspect("name").notice:  # until the waiter has stored its subscription
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
def test_the_end_of_a_hold_removes_no_waiter(
    server: GaleraServer, namespace: str, how: str
) -> None:
    """Also if its client never waited: sessions that are not found on this node may exist on
    another. The first waiter is called, and none is removed."""
    with peers(namespace, Flavour.BLOCKING, *[server.url] * 4) as (holder, *waiters):
        held, asked = holder.take(), [claim_of() for _ in waiters]
        for waiter, claim in zip(waiters, asked, strict=True):
            waiter.enter_queue(claim)
        backend = holder.backend
        work = backend.release(held) if how == "release" else backend.revoke("name")
        assert holder.do(work)
        with open_admin(server) as admin:
            row = "SELECT crowd FROM holdfast_lock WHERE namespace = %s"
            ((crowd,),) = rows(admin, row, namespace)
    entries = [entry.split(" ") for entry in crowd.decode().splitlines()]
    assert [entry[0] for entry in entries] == [claim.owner for claim in asked]
    assert [entry[5] != "-" for entry in entries] == [True, False, False]


@pytest.mark.parametrize(("shift", "difference"), [(-4.0, "4.0 s ahead of"), (4.0, "4.0 s behind")])
def test_a_node_with_another_clock_is_refused(
    server: GaleraServer,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    shift: float,
    difference: str,
) -> None:
    """A hold would end at another time there than on the other nodes."""
    with holdfast.connect(server.url, namespace=namespace) as locks:
        (clock,) = [finding for finding in locks.check() if finding.subject == "clock"]
        assert clock.level == "ok"
    monkeypatch.setattr("holdfast.stores.mysql.connect.wall", lambda: time.time() + shift)
    with (
        holdfast.connect(server.url, namespace=namespace, patience=0.5) as locks,
        pytest.raises(BackendUnavailable, match=f"Galera node whose clock is {difference}.*NTP"),
    ):
        locks.lock("name").acquire()


def test_a_clock_that_went_astray_is_reported(
    server: GaleraServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``check``, on connections that were opened before the clock changed."""
    with holdfast.connect(server.url, namespace=namespace) as locks:
        locks.check()
        monkeypatch.setattr(BlockingRuntime, "wall", lambda _: time.time() - 4.0)
        (clock,) = [finding for finding in locks.check() if finding.subject == "clock"]
    assert clock.level == "warning"
    difference = re.search(r"[0-9.]+ s", clock.detail)
    assert difference is not None
    assert abs(float(difference[0].removesuffix(" s")) - 4.0) < 2.0  # a check takes its time


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.SHARED])
@pytest.mark.parametrize("contended", [False, True])
def test_a_hold_is_over_when_it_is_by_all_clocks(
    server: GaleraServer,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    mode: Mode,
    contended: bool,
) -> None:
    """Clocks of nodes may differ by a second, ten in this test: a hold that expired two seconds ago
    may still be valid on another node."""
    assert SKEW_MICROS == 1_000_000
    monkeypatch.setattr("holdfast.stores.mysql.connect.SKEW_MICROS", 10_000_000)
    with (
        peers(namespace, Flavour.BLOCKING, *[server.url] * 3) as (holder, waiter, other),
        open_admin(server) as admin,
    ):
        held = holder.do(holder.backend.attempt(claim_of(mode=mode, ttl=600), join=True))
        assert isinstance(held, Grant)
        asked = claim_of()
        if contended:
            waiter.enter_queue(asked)
        for ago, over in ((2.0, False), (12.0, True)):
            run_out(admin, namespace, held, ago)
            answer = waiter.do(waiter.backend.attempt(asked, join=contended))
            assert isinstance(answer, Grant) == over
            if isinstance(answer, Busy):
                assert 1.0 < (answer.retry_seconds or 0.0) <= 8.0
                left = other.do(other.backend.look("name")).holders[0].remaining
                assert left == 0


def run_out(admin: Any, namespace: str, held: Grant, ago: float) -> None:
    """Changes the end of a stored hold to ``ago`` seconds before now, in its column or entry."""
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
