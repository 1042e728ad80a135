"""Everybody on one etcd."""

from __future__ import annotations

import base64
import os
from typing import Any
from urllib.parse import urlsplit

from benchmarks.contenders.common import ALONE, WAITS, nothing, polling, split
from benchmarks.contenders.http import RawHttp, complete, request
from benchmarks.tape import dial, record, replayer
from holdfast.bench.contender import CONTENDED, Client, Contender, Opener, Pair, Target, ours

__all__ = ["CONTENDERS"]

TTL = 60
POLL_SECONDS = 0.01


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _replay(target: Target) -> Client:
    tape = record(target.url, target.namespace)
    sock = dial(target.url)
    return split([replayer(sock, [one], complete) for one in tape.hold], tape.recorded.close)


def _least(target: Target) -> Client:
    """Create if absent, then delete, over the JSON gateway: no line, no fence, no lease of ours."""
    wire = RawHttp(target.url)
    lease = wire.ask("POST", "/v3/lease/grant", {"TTL": 600})["ID"]
    key = _b64(f"{target.namespace}/least")
    absent = {"key": key, "result": "EQUAL", "target": "CREATE", "create_revision": 0}
    put = {"request_put": {"key": key, "value": _b64("owner"), "lease": lease}}
    take = request("POST", "/v3/kv/txn", {"compare": [absent], "success": [put]})
    free = request("POST", "/v3/kv/deleterange", {"key": key})
    return split([lambda: wire.send(take), lambda: wire.send(free)], wire.close)


def _service(target: Target) -> Client:
    """etcd's own lock service, which queues by revision: one request waits, one lets go."""
    setup = RawHttp(target.url)
    lease = setup.ask("POST", "/v3/lease/grant", {"TTL": 600})["ID"]

    def lock(name: str) -> Pair:
        wire = RawHttp(target.url)
        text = f"{target.namespace}/service/{name}"
        take = request("POST", "/v3/lock/lock", {"name": _b64(text), "lease": lease})
        key: list[str] = []

        def acquire() -> None:
            import json

            key.append(json.loads(wire.send(take))["key"])

        return Pair(
            acquire, lambda: wire.send(request("POST", "/v3/lock/unlock", {"key": key.pop()}))
        )

    return Client(lock, setup.close)


def _etcd3gw(target: Target) -> Client:
    from etcd3gw.client import Etcd3Client

    parts = urlsplit(target.url)
    client = Etcd3Client(host=parts.hostname or "", port=parts.port or 0, api_path="/v3/")

    def lock(name: str) -> Pair:
        made = client.lock(f"{target.namespace}-{name}", ttl=TTL)
        return Pair(polling(made.acquire, POLL_SECONDS), made.release)

    return Client(lock, nothing)


def _etcd3(target: Target) -> Client:
    os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
    import etcd3

    parts = urlsplit(target.url)
    client = etcd3.client(host=parts.hostname, port=parts.port)

    def lock(name: str) -> Pair:
        made = client.lock(f"{target.namespace}-etcd3-{name}", ttl=TTL)
        return Pair(lambda: made.acquire(timeout=None), made.release)

    return Client(lock, client.close)


def _tooz(target: Target) -> Client:
    from tooz import coordination

    parts = urlsplit(target.url)
    coordinator = coordination.get_coordinator(
        f"etcd3+http://{parts.hostname}:{parts.port}?api_version=v3&lock_timeout={TTL}",
        b"benchmark",
    )
    coordinator.start()

    def lock(name: str) -> Pair:
        made = coordinator.get_lock(f"{target.namespace}-{name}".encode())
        return Pair(made.acquire, made.release)

    return Client(lock, coordinator.stop)


def _one(name: str, role: Any, open_: Opener, cases: frozenset[str] = WAITS) -> Contender:
    return Contender(name, "etcd", role, "blocking", open_, cases)


CONTENDERS = [
    _one("raw JSON gateway, same requests", "limit", _replay, ALONE),
    _one("raw JSON gateway, create and delete", "least", _least, ALONE),
    _one("raw JSON gateway, lock service", "limit", _service, frozenset({CONTENDED})),
    *ours("etcd"),
    _one("etcd3gw, polled every 10 ms", "peer", _etcd3gw),
    _one("etcd3", "peer", _etcd3),
    _one("tooz etcd3gw", "peer", _tooz),
]
