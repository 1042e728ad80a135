"""What ``check()`` says about the version of an etcd: for real servers, and for made-up replies."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from holdfast.core.contract import Finding
from holdfast.core.drive import run_now
from holdfast.stores.etcd.calls import STATUS, Reply
from holdfast.stores.etcd.messages import data, integer
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
    findings = _probe(peer(), version)
    (found,) = [finding for finding in findings if finding.subject == "version"]
    assert found.level == level
    assert re.search(says, found.detail)


def _probe(one: Peer, version: str) -> list[Finding]:
    """The findings if the server says that it has this version."""
    ask = one.post.ask

    async def answer(line: bytes, body: bytes = b"", until: float | None = None) -> Reply:
        if line != STATUS.path:
            reply: Reply = await ask(line, body, until)
            return reply
        header, leader = data(1, integer(3, 7)), integer(4, 1)
        return Reply(0, header + data(2, version.encode()) + leader)

    one.post.ask = answer  # type: ignore[method-assign]
    return run_now(one.backend.probe())


def test_a_version_that_is_too_old(peer: Callable[[], Peer]) -> None:
    """The finding names it; no other request is sent."""
    one = peer()
    (found,) = _probe(one, "3.3.27")
    assert (found.subject, found.level) == ("version", "broken")
    assert "etcd 3.3.27 is too old: 3.4 or newer is needed" in found.detail
