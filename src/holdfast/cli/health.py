"""``--health HOST:PORT``: tells probes over HTTP whether this process leads or stands by.

| path | answer |
|---|---|
| ``/`` | 200 with JSON: name, state, and the token of a leader |
| ``/leader`` | 200 ``leader``, or 503 ``standby`` |
| ``/live`` | 200 for as long as this program runs |
"""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from holdfast.cli.exits import BadSetting

if TYPE_CHECKING:
    from types import TracebackType

    from holdfast import Lease

__all__ = ["HealthServer"]

REQUEST_SECONDS = 5.0
"""A probe that sends no request within this time is disconnected."""
MOST_REQUESTS = 32
"""Requests served at once; further connections are closed unanswered."""


class HealthServer:
    """Serves the state of one candidate from a thread of its own; a context manager."""

    def __init__(self, address: tuple[str, int], name: str) -> None:
        """Binds the address; raises ``BadSetting`` if that fails."""
        self.lease: Lease | None = None
        """The lease of the leadership, while there is one."""
        self._name = name
        self._server = _bind(address, self)

    def __enter__(self) -> Self:
        serve = self._server.serve_forever
        threading.Thread(target=serve, name="holdfast-health", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """The status, the content type and the body for a path."""
        lease = self.lease
        state = "leader" if lease is not None and lease.held else "standby"
        if path == "/":
            shown: dict[str, object] = {"name": self._name, "state": state}
            if lease is not None and state == "leader":
                shown["token"] = lease.token
            return 200, "application/json", json.dumps(shown).encode() + b"\n"
        if path == "/leader":
            return 200 if state == "leader" else 503, "text/plain", f"{state}\n".encode()
        if path == "/live":
            return 200, "text/plain", b"live\n"
        return 404, "text/plain", b"/, /leader and /live are served here\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], health: HealthServer) -> None:
        self.health = health
        self._free = threading.BoundedSemaphore(MOST_REQUESTS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A probe that hangs up is no event."""


class _Handler(BaseHTTPRequestHandler):
    server_version = "holdfast"
    sys_version = ""
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        status, kind, body = self.server.health.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Probes come every few seconds: they are not logged."""


def _bind(address: tuple[str, int], health: HealthServer) -> _Server:
    host, port = address
    server = _Server6 if ":" in host else _Server
    try:
        return server(address, health)
    except OSError as error:
        raise BadSetting(f"--health {host}:{port}: {error.strerror or error}") from None


class _Server6(_Server):
    address_family = socket.AF_INET6
