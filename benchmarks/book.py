"""All contenders, and how each server tells its number of requests: what workers import."""

from __future__ import annotations

import functools
import importlib
import re
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

from benchmarks.tape import dial
from holdfast.bench.contender import Contender

__all__ = ["CASES", "STORES", "contenders", "request_counter"]

STORES = (
    "memory",
    "sqlite",
    "redis",
    "redlock",
    "etcd",
    "consul",
    "zookeeper",
    "postgres",
    "mysql",
)
CASES = {
    "requests": "benchmarks.requests_case:requests_job",
    "redlock": "benchmarks.redlock_case:redlock_job",
}
"""Cases that only make sense with servers of our own."""


@functools.cache
def contenders() -> list[Contender]:
    found: list[Contender] = []
    for store in STORES:
        module = importlib.import_module(f"benchmarks.contenders.{store}")
        found += module.CONTENDERS
    return found


def request_counter(store: str, url: str) -> Callable[[], float] | None:
    """Less the asking itself, where that counts."""
    make = {"redis": _redis, "etcd": _etcd, "mysql": _mysql, "zookeeper": _zookeeper}.get(store)
    return None if make is None else make(url)


def _redis(url: str) -> Callable[[], float]:
    """Reads from sockets: a pipelined batch is one, and what a script calls inside is none."""
    sock, asked = dial(url), 0

    def count() -> float:
        nonlocal asked
        asked += 1
        sock.sendall(b"INFO stats\r\n")
        reply = sock.recv(65536)
        while not reply.endswith(b"\r\n\r\n") and b"io_threaded_reads" not in reply:
            reply += sock.recv(65536)
        found = re.search(rb"total_reads_processed:(\d+)", reply)
        return float(found[1]) - asked if found else 0.0

    return count


def _etcd(url: str) -> Callable[[], float]:
    parts = urlsplit(url)

    def count() -> float:
        with urllib.request.urlopen(f"http://{parts.hostname}:{parts.port}/metrics") as reply:
            text = reply.read().decode()
        pattern = r"^grpc_server_msg_received_total\{.*\} ([\d.e+]+)$"
        return sum(map(float, re.findall(pattern, text, re.MULTILINE)))

    return count


def _mysql(url: str) -> Callable[[], float]:
    import pymysql

    parts = urlsplit(url)
    connection = pymysql.connect(
        host=parts.hostname or "",
        port=parts.port or 3306,
        user=parts.username,
        password=parts.password or "",
    )
    asked = 0

    def count() -> float:
        nonlocal asked
        asked += 1
        with connection.cursor() as cursor:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
            row = cursor.fetchone()
        return float(row[1]) - asked if row else 0.0

    return count


def _zookeeper(url: str) -> Callable[[], float]:
    def count() -> float:
        sock = dial(url)
        sock.sendall(b"mntr")
        with sock.makefile("rb") as reply:
            text = reply.read().decode()
        sock.close()
        found = re.search(r"zk_packets_received\s+(\d+)", text)
        return float(found[1]) if found else 0.0

    return count
