"""Servers of etcd and Consul that ask for a client's certificate."""

from __future__ import annotations

import http.client
import ssl

from servers.consul import ConsulServer
from servers.etcd import EtcdServer
from servers.tls import Certificate

__all__ = ["MutualConsul", "MutualEtcd", "mutual_url"]


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
