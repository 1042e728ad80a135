"""The hosts of one store that are equal: which is current, its TLS settings, and error texts.

Requests go to the current host; if it fails, the next host becomes the current one.
"""

from __future__ import annotations

import ssl
from typing import NamedTuple

from holdfast.errors import BackendUnavailable

__all__ = ["Hosts", "Tls", "describe"]

# The time of a request is divided by the number of hosts, but at most by this.
MOST_HOST_SHARES = 3


class Tls(NamedTuple):
    """Paths of the certificates. Verification is always on."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def context(self, alpn: str) -> ssl.SSLContext:
        """``alpn``: the protocol to agree on, as its name is there; "" for none."""
        context = ssl.create_default_context(cafile=self.ca or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key or None)
        if alpn:
            context.set_alpn_protocols([alpn])
        return context


class Hosts:
    """The hosts of one store, and which of them is current. Shared by all its backends."""

    def __init__(
        self,
        display: str,
        hosts: tuple[tuple[str, int], ...],
        *,
        tls: Tls | None,
        request_seconds: float,
        alpn: str = "",
    ) -> None:
        self.display, self.hosts = display, hosts
        # A host that hangs, or lost a request in an election, must leave time for the others.
        self.request_seconds = request_seconds / min(len(hosts), MOST_HOST_SHARES)
        self.alpn = alpn
        """What TLS must agree on with the server; "" for nothing."""
        self.known = False
        """Whether a server has answered as this kind of store does. Before that, an answer of
        another kind means that it is another kind of server; later it may be a proxy's."""
        self.closed_hint = ""
        """Why the server may close connections, for messages."""
        self.current = 0
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self.authorities = [
            (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()
            for host, port in hosts
        ]

    @property
    def tls(self) -> bool:
        return self._tls is not None

    def context(self) -> ssl.SSLContext | None:
        """The TLS settings, read from their files at first use. A file that can't be read is a
        final refusal: no host and no later attempt changes that."""
        if self._tls is not None and self._context is None:
            try:
                self._context = self._tls.context(self.alpn)
            except (OSError, ssl.SSLError) as error:
                files = ", ".join(filter(None, self._tls))
                text = f"{self.display}: the files for TLS can't be used ({files}): {error}"
                raise BackendUnavailable(text, final=True) from None
        return self._context

    def name(self, host: int) -> str:
        return self.authorities[host].decode()

    def failed(self, host: int) -> None:
        """Makes the next host the current one, unless another thread has done so already."""
        if self.current == host:
            self.current = (host + 1) % len(self.hosts)

    def closed(self) -> BackendUnavailable:
        return BackendUnavailable(f"{self.display} was closed")

    def unavailable(self, tried: list[str]) -> BackendUnavailable:
        return BackendUnavailable(f"{self.display} can't be reached: {'; '.join(tried)}")

    def unknown(self, host: int, line: bytes, error: BaseException) -> BackendUnavailable:
        """The error for a request that was sent and has no answer."""
        what = line.partition(b"?")[0].decode()
        why = describe(error)
        if self.closed_hint and isinstance(error, ConnectionError):
            why = f"{why} ({self.closed_hint})"
        return BackendUnavailable(f"{self.display}: {self.name(host)}: {what}: {why}")


def describe(error: BaseException) -> str:
    """An error as text that never contains parts of the request."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"{error.strerror or error}" if isinstance(error, OSError) else type(error).__name__
