"""Everybody on one Consul."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from benchmarks.contenders.common import ALONE, WAITS, nothing, split
from benchmarks.contenders.http import RawHttp, complete, request
from benchmarks.tape import dial, record, replayer
from holdfast.bench.contender import CONTENDED, Client, Contender, Opener, Pair, Target, ours

__all__ = ["CONTENDERS"]


def _replay(target: Target) -> Client:
    tape = record(target.url, target.namespace)
    sock = dial(target.url)
    return split([replayer(sock, [one], complete) for one in tape.hold], tape.recorded.close)


def _session(wire: RawHttp) -> str:
    body = {"TTL": "600s", "LockDelay": "0s", "Checks": []}
    return str(wire.ask("PUT", "/v1/session/create", body)["ID"])


def _recipe(target: Target) -> Client:
    """Acquire the key, wait at it with a blocking query, release it: no line, no fence."""
    wire = RawHttp(target.url)
    session = _session(wire)

    def lock(name: str) -> Pair:
        key = f"/v1/kv/{target.namespace}/raw/{name}"
        take = request("PUT", f"{key}?acquire={session}", "")
        free = request("PUT", f"{key}?release={session}", "")

        def acquire() -> None:
            while wire.send(take).strip() != b"true":
                found = wire.ask("GET", key)[0]
                if found.get("Session"):
                    wire.ask("GET", f"{key}?index={found['ModifyIndex']}&wait=10s")

        return Pair(acquire, lambda: wire.send(free))

    return Client(lock, wire.close)


def _py_consul(target: Target) -> Client:
    import consul

    parts = urlsplit(target.url)
    client: Any = consul.Consul(host=parts.hostname, port=parts.port)
    session = client.session.create(ttl=600, lock_delay=0, behavior="release")

    def lock(name: str) -> Pair:
        key = f"{target.namespace}/py-consul/{name}"

        def acquire() -> None:
            while not client.kv.put(key, "", acquire=session):
                index, found = client.kv.get(key)
                if found and found.get("Session"):
                    client.kv.get(key, index=index, wait="10s")

        return Pair(acquire, lambda: client.kv.put(key, "", release=session))

    return Client(lock, nothing)


def _one(name: str, role: Any, open_: Opener, cases: frozenset[str] = WAITS) -> Contender:
    return Contender(name, "consul", role, "blocking", open_, cases)


CONTENDERS = [
    _one("raw HTTP, same requests", "limit", _replay, ALONE),
    _one("raw HTTP, acquire and release", "least", _recipe, ALONE),
    _one("raw HTTP, blocking query", "limit", _recipe, frozenset({CONTENDED})),
    *ours("consul"),
    _one("py-consul recipe", "peer", _py_consul),
]
