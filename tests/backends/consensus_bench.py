"""Servers of etcd and Consul that ask for a client's certificate, and one who waits for a name."""

from __future__ import annotations

import asyncio
import http.client
import ssl
import threading

import holdfast
from holdfast.testing import Flavour
from servers.consul import ConsulServer
from servers.etcd import EtcdServer
from servers.process import wait_until
from servers.tls import Certificate

__all__ = ["MutualConsul", "MutualEtcd", "hold_once", "mutual_url", "somebody_waits"]


def _get(port: int, path: str, own: Certificate) -> int:
    """The status of one request that shows a certificate."""
    context = ssl.create_default_context(cafile=own.certificate)
    context.load_cert_chain(own.certificate, own.key)
    wire = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    try:
        wire.request("GET", path)
        return wire.getresponse().status
    finally:
        wire.close()


class MutualEtcd(EtcdServer):
    """Lets nobody in who shows no certificate of its authority's."""

    def __init__(self) -> None:
        super().__init__(tls=True)
        assert self.tls is not None
        self.arguments += ["--client-cert-auth", "--trusted-ca-file", str(self.tls.certificate)]

    def answers(self) -> bool:
        assert self.tls is not None
        return _get(self.port, "/health", self.tls) == http.client.OK


class MutualConsul(ConsulServer):
    """Lets nobody in who shows no certificate of its authority's."""

    def __init__(self) -> None:
        super().__init__(tls=True)
        assert self.tls is not None
        self.config |= {"verify_incoming_https": True, "ca_file": str(self.tls.certificate)}

    def answers(self) -> bool:
        assert self.tls is not None
        return _get(self.port, "/v1/kv/?keys&consistent", self.tls) in (200, 404)


def mutual_url(server: MutualEtcd | MutualConsul) -> str:
    """The URL of one who has a certificate."""
    assert server.tls is not None
    return f"{server.url}&cert={server.tls.certificate}&key={server.tls.key}"


def somebody_waits(locks: holdfast.Locks) -> None:
    """Returns once somebody stands in line for the name."""
    wait_until("a waiter", lambda: bool(locks.inspect("name").waiters))


def hold_once(url: str, namespace: str, flavour: Flavour, got: threading.Event) -> None:
    """For a thread of its own: says when it has got the name."""
    if flavour is Flavour.BLOCKING:
        with holdfast.connect(url, namespace=namespace) as locks, locks.lock("name"):
            got.set()
    else:
        asyncio.run(_hold_once_async(url, namespace, got))


async def _hold_once_async(url: str, namespace: str, got: threading.Event) -> None:
    async with holdfast.connect_async(url, namespace=namespace) as locks, locks.lock("name"):
        got.set()
