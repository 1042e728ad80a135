"""Everybody on one etcd."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from benchmarks.contenders.common import ALONE, WAITS, nothing, polling, split
from benchmarks.contenders.grpc import RawGrpc
from holdfast.bench.contender import CONTENDED, Client, Contender, Opener, Pair, Target, ours
from holdfast.stores.etcd import messages, requests

__all__ = ["CONTENDERS"]

TTL = 60
POLL_SECONDS = 0.01


def _lease(wire: RawGrpc) -> str:
    message = messages.grant_lease(600)
    return messages.grant_reply(wire.ask("/etcdserverpb.Lease/LeaseGrant", message)).id


def _same(target: Target) -> Client:
    """The two requests of an uncontended hold."""
    wire = RawGrpc(target.url)
    lease, names = _lease(wire), requests.Names(f"{target.namespace}-limit")
    keys, key = names.of("benchmark"), f"{names.root}benchmark/l/w/0123456789abcdef".encode()
    value = b'[1,1,1,0,1700000000.000,[],0,"[\\"host\\",1,\\"MainThread\\",\\"\\"]"]'
    body = keys.take(requests.written(names.guard(lease), 0), key, lease, value)
    return _two(wire, body, requests.only(key))


def _least(target: Target) -> Client:
    """Create if absent, then delete: no line, no fence, no lease of ours."""
    wire, key = RawGrpc(target.url), f"{target.namespace}/least".encode()
    put = requests.put(key, b"owner", _lease(wire))
    return _two(wire, requests.txn([requests.created_at(key, 0)], [put]), requests.only(key))


def _two(wire: RawGrpc, body: bytes, key: bytes) -> Client:
    take = wire.prepared("/etcdserverpb.KV/Txn", body)
    free = wire.prepared("/etcdserverpb.KV/DeleteRange", key)
    return split([lambda: wire.send(take), lambda: wire.send(free)], wire.close)


def _service(target: Target) -> Client:
    """etcd's own lock service, which queues by revision: one request waits, one lets go."""
    setup = RawGrpc(target.url)
    lease = _lease(setup)

    def lock(name: str) -> Pair:
        wire = RawGrpc(target.url)
        text = f"{target.namespace}/service/{name}".encode()
        wanted = messages.data(1, text) + messages.integer(2, int(lease))
        take = wire.prepared("/v3lockpb.Lock/Lock", wanted)
        key: list[bytes] = []

        def release() -> None:
            wire.ask("/v3lockpb.Lock/Unlock", messages.data(1, key.pop()))

        return Pair(lambda: key.append(_key(wire.send(take))), release)

    return Client(lock, setup.close)


def _key(reply: bytes) -> bytes:
    """The key in a reply of the lock service, whose fields are as those of a sign-in."""
    return messages.token_reply(reply).encode()


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
    _one("raw gRPC, same requests", "limit", _same, ALONE),
    _one("raw gRPC, create and delete", "least", _least, ALONE),
    _one("raw gRPC, lock service", "limit", _service, frozenset({CONTENDED})),
    *ours("etcd"),
    _one("etcd3gw, polled every 10 ms", "peer", _etcd3gw),
    _one("etcd3", "peer", _etcd3),
    _one("tooz etcd3gw", "peer", _tooz),
]
