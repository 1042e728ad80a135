"""Servers of etcd and Consul that require a client certificate."""

from __future__ import annotations

import http.client
import ssl

from servers.consul import ConsulServer
from servers.etcd import EtcdServer
from servers.tls import Certificate

__all__ = ["MutualConsul", "MutualEtcd", "mutual_url"]


def _get(port: int, path: str, own: Certificate) -> int:
    """Send one request with a client certificate; return its status."""
    context = ssl.create_default_context(cafile=own.certificate)
    context.load_cert_chain(own.certificate, own.key)
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


class MutualEtcd(EtcdServer):
    """Refuses clients without a certificate of its certificate authority."""

    def __init__(self) -> None:
        super().__init__(tls=True)
        assert self.tls is not None
        self.arguments += ["--client-cert-auth", "--trusted-ca-file", str(self.tls.certificate)]

    def answers(self) -> bool:
        assert self.tls is not None
        return _get(self.port, "/health", self.tls) == http.client.OK


class MutualConsul(ConsulServer):
    """Refuses clients without a certificate of its certificate authority."""

    def __init__(self) -> None:
        super().__init__(tls=True)
        assert self.tls is not None
        self.config |= {"verify_incoming_https": True, "ca_file": str(self.tls.certificate)}

    def answers(self) -> bool:
        assert self.tls is not None
        return _get(self.port, "/v1/kv/?keys&consistent", self.tls) in (200, 404)


def mutual_url(server: MutualEtcd | MutualConsul) -> str:
    """Return a URL with a client certificate."""
    assert server.tls is not None
    return f"{server.url}&cert={server.tls.certificate}&key={server.tls.key}"
