"""What ``check()`` says about the version of an etcd: for real servers, and for made-up replies."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import holdfast
from holdfast.core.contract import Finding
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, GuaranteeNotMet
from holdfast.io.http import Reply
from holdfast.testing import Flavour
from servers.etcd import EtcdServer, Version
from servers.registry import Servers
from stores.etcd import helpers
from stores.http_peer import Peer
from stores.recovery import client, drive

server, peer = helpers.server, helpers.peer

STUCK = "a leader that was stuck may end leases that are alive"


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize(("version", "sound"), [("3.4", "3.4.31"), ("3.5", "3.5.13")])
def test_the_servers_of_these_tests(
    servers: Servers, namespace: str, version: Version, sound: str, flavour: Flavour
) -> None:
    """Both work, and both have the bug that the finding warns of."""
    server = servers.of(EtcdServer, version=version)
    (found,) = drive(flavour, _check(server.url, flavour, namespace))
    assert found.detail.startswith(f"etcd {version}.")
    assert found.level == "warning"
    assert f"{STUCK}; {sound} fixes it" in found.detail


async def _check(url: str, flavour: Flavour, namespace: str) -> list[Finding]:
    """The findings about the version; the other findings are not broken."""
    async with client(url, flavour, namespace) as locks:
        findings = await locks.check()
    assert not any(finding.level == "broken" for finding in findings)
    return [finding for finding in findings if finding.subject == "version"]


@pytest.mark.parametrize(
    ("version", "level", "says"),
    [
        ("3.4.23", "warning", "etcd 3.4.23: .* 3.4.31 fixes it"),
        ("3.4.30", "warning", "3.4.31 fixes it"),
        ("3.4.31", "ok", "etcd 3.4.31$"),
        ("3.5.0", "warning", "3.5.13 fixes it"),
        ("3.5.1", "warning", "etcd 3.5.1: .* 3.5.13 fixes it"),
        ("3.5.12", "warning", "3.5.13 fixes it"),
        ("3.5.13", "ok", "etcd 3.5.13$"),
        ("3.6.0-rc.1", "ok", "etcd 3.6.0-rc.1$"),
        ("4.0.0", "ok", "etcd 4.0.0$"),
        ("", "warning", "does not say its version"),
        ("unknown", "warning", "does not say its version"),
    ],
)
def test_other_versions(peer: Callable[[], Peer], version: str, level: str, says: str) -> None:
    """A warning where leases that are alive may end; otherwise just the version."""
    findings = _probe(peer(), json.dumps({"etcdserver": version}).encode())
    (found,) = [finding for finding in findings if finding.subject == "version"]
    assert found.level == level
    assert re.search(says, found.detail)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]"])
def test_an_answer_that_is_no_version(peer: Callable[[], Peer], body: bytes) -> None:
    """A proxy may have sent it."""
    (found,) = [each for each in _probe(peer(), body) if each.subject == "version"]
    assert (found.level, found.detail) == ("warning", "the server does not say its version")


def _probe(one: Peer, version: bytes) -> list[Finding]:
    """The findings if the server replies this to the request for its version."""
    ask = one.post.ask

    async def answer(line: bytes, body: bytes = b"", until: float | None = None) -> Reply:
        return Reply(200, version) if line == b"GET /version" else await ask(line, body, until)

    one.post.ask = answer  # type: ignore[method-assign]
    return run_now(one.backend.probe())


class Old(http.server.BaseHTTPRequestHandler):
    """An etcd 3.3, whose gateway has another path."""

    def do_GET(self) -> None:
        self._answer(200, {"etcdserver": "3.3.27", "etcdcluster": "3.3.0"})

    def do_POST(self) -> None:
        self._answer(404, {})

    def _answer(self, status: int, body: dict[str, str]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _old() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Old) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"etcd://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


def test_a_version_that_is_too_old() -> None:
    """The finding names it, although no other request is possible; and no lock is granted there."""
    with _old() as url, holdfast.connect(url) as locks:
        with pytest.raises(GuaranteeNotMet, match=r"etcd 3\.3\.27 is too old: 3\.4 or newer"):
            locks.check()
        with pytest.raises(BackendUnavailable, match=r"older than 3\.4"):
            locks.lock("name").acquire()
