"""Every server starts, answers, pauses, dies, comes back with its data, and leaves nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pymysql
import pytest
from kazoo.client import KazooClient

from servers.consul import ConsulServer, ConsulTrio
from servers.etcd import EtcdServer, EtcdTrio
from servers.memcached import MemcachedServer
from servers.missing import ServerMissing, program
from servers.mysql import DATABASE, USER, MySQLServer
from servers.postgres import PgBouncer, PostgresServer
from servers.process import Server, ServerFailed
from servers.redis import RedisServer
from servers.redis_cluster import RedisCluster
from servers.redis_sentinel import SentinelTrio
from servers.registry import Servers
from servers.tree import runs
from servers.zookeeper import ZooKeeperServer, ZooKeeperTrio

Write = Callable[[Server], None]
Read = Callable[[Server], bool]


def redis_write(server: Server) -> None:
    assert isinstance(server, RedisServer)
    assert server.ask("SET", "kept", "yes") == "OK"


def redis_read(server: Server) -> bool:
    assert isinstance(server, RedisServer)
    return server.ask("GET", "kept") == "yes"


def etcd_write(server: Server) -> None:
    assert isinstance(server, EtcdServer)
    server.ask("/v3/kv/put", {"key": "a2VwdA==", "value": "eWVz"})


def etcd_read(server: Server) -> bool:
    assert isinstance(server, EtcdServer)
    return "kvs" in server.ask("/v3/kv/range", {"key": "a2VwdA=="})


def consul_write(server: Server) -> None:
    assert isinstance(server, ConsulServer)
    assert server.ask("/v1/kv/kept", "yes", method="PUT") is True


def consul_read(server: Server) -> bool:
    assert isinstance(server, ConsulServer)
    # A missing key is a 404 and so an error; the listing of all keys is not.
    return "kept" in server.ask("/v1/kv/?keys")


@contextlib.contextmanager
def zookeeper_client(server: Server) -> Iterator[KazooClient]:
    client = KazooClient(f"{server.host}:{server.port}", timeout=5)
    client.start(timeout=10)
    try:
        yield client
    finally:
        client.stop()
        client.close()


def zookeeper_write(server: Server) -> None:
    with zookeeper_client(server) as client:
        client.create("/kept", b"yes")


def zookeeper_read(server: Server) -> bool:
    with zookeeper_client(server) as client:
        return client.exists("/kept") is not None


def postgres_write(server: Server) -> None:
    with psycopg.connect(server.url) as connection:
        connection.execute("CREATE TABLE kept (yes int)")


def postgres_read(server: Server) -> bool:
    with psycopg.connect(server.url) as connection:
        row = connection.execute("SELECT to_regclass('kept')").fetchone()
    return row is not None and row[0] is not None


def mysql_run(server: MySQLServer, statement: str) -> int:
    connection = pymysql.connect(
        host=server.host, port=server.port, user=USER, password=server.password, database=DATABASE
    )
    with connection, connection.cursor() as cursor:
        return cursor.execute(statement)


def mysql_write(server: Server) -> None:
    assert isinstance(server, MySQLServer)
    mysql_run(server, "CREATE TABLE kept (yes int)")


def mysql_read(server: Server) -> bool:
    assert isinstance(server, MySQLServer)
    return mysql_run(server, "SHOW TABLES LIKE 'kept'") == 1


KINDS: dict[str, tuple[Callable[[], Server], Write, Read]] = {
    "redis": (lambda: RedisServer(persist=True), redis_write, redis_read),
    "redis-tls": (lambda: RedisServer(persist=True, tls=True), redis_write, redis_read),
    "etcd": (lambda: EtcdServer(election_ms=200), etcd_write, etcd_read),
    "etcd-3.5-tls": (
        lambda: EtcdServer(version="3.5", tls=True, election_ms=200),
        etcd_write,
        etcd_read,
    ),
    "consul": (ConsulServer, consul_write, consul_read),
    "zookeeper": (ZooKeeperServer, zookeeper_write, zookeeper_read),
    "postgres": (PostgresServer, postgres_write, postgres_read),
    "postgres-tls": (lambda: PostgresServer(tls=True), postgres_write, postgres_read),
    "mysql": (MySQLServer, mysql_write, mysql_read),
}


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_life(kind: str) -> None:
    make, write, read = KINDS[kind]
    with make() as server:
        folder = server.folder
        write(server)
        server.pause()
        assert not _answers_within(server, 0.2)
        server.resume()
        assert read(server)
        server.kill()
        assert not server.alive
        server.restart()
        assert read(server), "acknowledged data survives kill -9"
        server.wipe()
        assert not read(server)
        server.stop()
        assert not server.alive
    assert not folder.exists()


def _answers_within(server: Server, seconds: float) -> bool:
    try:
        server.wait_ready(seconds)
    except ServerFailed:
        return False
    return True


@pytest.mark.faults
@pytest.mark.parametrize("trio", [EtcdTrio, ConsulTrio, ZooKeeperTrio])
def test_another_leads_when_the_leader_is_killed(
    trio: type[EtcdTrio] | type[ConsulTrio] | type[ZooKeeperTrio],
) -> None:
    with trio() as ensemble:
        first = ensemble.leader()
        first.kill()
        assert ensemble.leader() is not first
        first.restart()
        assert ensemble.alive


@pytest.mark.faults
def test_sentinels_promote_the_replica() -> None:
    with SentinelTrio(down_ms=300) as trio:
        assert trio.current_master() is trio.master
        trio.master.kill()
        deadline = time.monotonic() + 20
        while trio.current_master() is trio.master and time.monotonic() < deadline:
            time.sleep(0.05)
        assert trio.current_master() in trio.replicas


def test_a_cluster_serves_every_slot() -> None:
    with RedisCluster() as cluster:
        shares = [str(node.ask("CLUSTER", "INFO")) for node in cluster.nodes]
        assert all("cluster_slots_ok:16384" in share for share in shares)


@pytest.mark.faults
def test_memcached_forgets_when_it_restarts() -> None:
    with MemcachedServer() as server:
        assert server.ask(b"add kept 0 0 3\r\nyes\r\n") == b"STORED\r\n"
        assert b"yes" in server.ask(b"get kept\r\n")
        server.pause()
        assert not _answers_within(server, 0.2)
        server.resume()
        server.restart()
        assert server.ask(b"get kept\r\n") == b"END\r\n"


def test_redis_users_and_passwords() -> None:
    users = ["alice on >wonder ~* &* +@all"]
    with RedisServer(password="secret", users=users) as server:
        assert ":secret@" in server.url
        assert server.ask("AUTH", "alice", "wonder") == "OK"


def test_pgbouncer_pools_by_transaction(servers: Servers) -> None:
    server = servers.of(PostgresServer)
    with PgBouncer(server) as pooler, psycopg.connect(pooler.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_postgres_with_a_password() -> None:
    with PostgresServer(password="p@ss word") as server:
        with psycopg.connect(server.url) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.url.replace("p%40ss", "guess"))


def test_shared_servers_are_mended(servers: Servers) -> None:
    server = servers.of(RedisServer)
    assert servers.of(RedisServer) is server
    server.pause()
    assert servers.of(RedisServer).ask("PING") == "PONG"
    server.kill()
    assert servers.of(RedisServer).ask("PING") == "PONG"


def test_a_server_that_cannot_start_shows_its_log() -> None:
    server = RedisServer(arguments=["--no-such-option", "1"])
    with pytest.raises(ServerFailed, match="no-such-option"), server:
        pass
    assert not server.folder.exists()


def test_a_missing_program_names_its_package() -> None:
    with pytest.raises(ServerMissing, match=r"no-such-server.*no-such-package"):
        program("no-such-server", "no-such-package")


def test_servers_end_with_a_test_process_that_is_killed() -> None:
    code = (
        "import time; from servers.redis import RedisServer; s = RedisServer().start();"
        "print(s.pid, s.folder, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().split()
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    # The guardian kills first and removes the folder then, but a killed process needs a moment.
    while (Path(folder).exists() or runs(int(pid))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(folder).exists()
    assert not runs(int(pid))
