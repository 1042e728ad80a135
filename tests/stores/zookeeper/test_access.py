"""Access to ZooKeeper: users, certificates, paths, URLs."""

from __future__ import annotations

import socket
import struct
from urllib.parse import quote

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl_credential

import holdfast
from holdfast.core.contract import Settings
from holdfast.errors import BackendUnavailable
from holdfast.stores.zookeeper.client.packets import Acl
from holdfast.stores.zookeeper.store import ZooKeeperStore
from holdfast.testing import Flavour
from holdfast.url import open_store
from servers.registry import Servers
from stores.fake_server import fake_server
from stores.recovery import client, drive
from stores.waiting import waited_for
from stores.zookeeper import helpers
from stores.zookeeper.helpers import QuickServer, SaslServer, SecureServer, hold

server = helpers.server


def test_nodes_belong_to_their_user(
    server: QuickServer, namespace: str, kazoo: KazooClient
) -> None:
    """Other users can't read the nodes of a user, and no secret is shown."""
    with holdfast.connect(_as(server, "us", "s3cret:/?"), namespace=namespace) as locks:
        with locks.lock("name"):
            kazoo.add_auth("digest", "us:s3cret:/?")
            (acl,) = kazoo.get_acls(f"/{namespace}/locks/name")[0]
            assert (acl.id.scheme, acl.id.id.split(":")[0]) == ("digest", "us")
            with holdfast.connect(_as(server, "them", "x"), namespace=namespace) as others:
                with pytest.raises(BackendUnavailable, match="another user's") as caught:
                    others.lock("name").acquire()
                assert "s3cret" not in str(caught.value)
        assert "s3cret" not in repr(locks)


@pytest.mark.usefixtures("no_recheck")
@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("way", ["url", "environment"])
def test_waiting_as_a_user(
    server: QuickServer,
    namespace: str,
    kazoo: KazooClient,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    flavour: Flavour,
) -> None:
    """User and password come from the URL or the environment; watches work with them."""
    monkeypatch.setenv("HOLDFAST_ZOOKEEPER_USERNAME", "us" if way == "environment" else "them")
    monkeypatch.setenv("HOLDFAST_ZOOKEEPER_PASSWORD", "s3cret")
    url = server.url if way == "environment" else _as(server, "us", "s3cret")
    with waited_for(url, namespace, flavour):
        kazoo.add_auth("digest", "us:s3cret")
        for node in kazoo.get_children(f"/{namespace}/locks/name"):
            (acl,) = kazoo.get_acls(f"/{namespace}/locks/name/{node}")[0]
            assert (acl.id.scheme, acl.id.id.split(":")[0]) == ("digest", "us")


def _as(server: QuickServer, user: str, password: str) -> str:
    return f"zookeeper://{user}:{quote(password, safe='')}@{server.host}:{server.port}"


def test_sasl(servers: Servers, namespace: str) -> None:
    """Nodes belong to the authenticated user; a wrong password raises an error."""
    pytest.importorskip("puresasl", reason="auth=sasl needs the package pure-sasl")
    server = servers.of(SaslServer)
    with holdfast.connect(f"{_as(server, 'us', 's3cret')}?auth=sasl", namespace=namespace) as locks:
        with (
            locks.lock("name"),
            holdfast.connect(server.url, namespace=namespace) as others,
            pytest.raises(BackendUnavailable, match="another user's") as denied,
        ):
            others.lock("name").acquire()
        assert denied.value.final
        assert not others._engine.store.entries  # type: ignore[attr-defined]
        server.restart()
        with locks.lock("name", timeout=30) as lease:
            assert lease.held
    wrong = f"{_as(server, 'us', 'wr0ng')}?auth=sasl"
    with holdfast.connect(wrong, namespace=namespace) as locks:
        with pytest.raises(BackendUnavailable, match="refuses our user") as caught:
            locks.lock("name").acquire()
        assert caught.value.final
        assert "wr0ng" not in str(caught.value)


def test_a_server_that_stops_during_sasl(
    servers: Servers, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not refused the password: the next server is tried."""
    pytest.importorskip("puresasl", reason="auth=sasl needs the package pure-sasl")
    greetings: list[bytes] = []

    def stop(sock: socket.socket) -> None:
        greetings.append(sock.recv(65_536))
        _, _, _, milliseconds = struct.unpack_from("!iiqi", greetings[-1])
        granted = max(1000, milliseconds)
        sock.sendall(struct.pack("!iiiqi16s?", 37, 0, granted, 7, 16, b"", False))
        sock.recv(65_536)

    # The servers are tried in the order of the URL.
    monkeypatch.setattr("holdfast.stores.zookeeper.session.between", lambda low, _: low)
    server = servers.of(SaslServer)
    with fake_server(stop) as port:
        first = f"zookeeper://us:s3cret@127.0.0.1:{port}"
        with holdfast.connect(f"{first}?auth=sasl", namespace=namespace) as locks:
            with pytest.raises(BackendUnavailable, match="during SASL") as caught:
                locks.lock("name", timeout=1).acquire()
            assert not caught.value.final
        greetings.clear()
        both = f"{first},{server.host}:{server.port}?auth=sasl"
        with holdfast.connect(both, namespace=namespace) as locks:
            assert hold(locks, "name") > 0
        assert greetings


@pytest.mark.usefixtures("no_recheck")
@pytest.mark.parametrize("flavour", list(Flavour))
def test_waiting_with_sasl(servers: Servers, namespace: str, flavour: Flavour) -> None:
    """A waiter is woken."""
    pytest.importorskip("puresasl", reason="auth=sasl needs the package pure-sasl")
    url = f"{_as(servers.of(SaslServer), 'us', 's3cret')}?auth=sasl"
    with waited_for(url, namespace, flavour):
        pass


def test_a_path_in_the_url_is_created(
    server: QuickServer, namespace: str, kazoo: KazooClient
) -> None:
    """With all its parents."""
    with holdfast.connect(f"{server.url}/{namespace}/deep/down") as locks, locks.lock("name"):
        assert len(kazoo.get_children(f"/{namespace}/deep/down/holdfast/locks/name")) == 1


@pytest.mark.usefixtures("no_recheck")
@pytest.mark.parametrize("flavour", list(Flavour))
def test_tls_and_client_certificates(servers: Servers, namespace: str, flavour: Flavour) -> None:
    """Server and client verify each other's certificates; a waiter is woken."""
    secure = servers.of(SecureServer)
    files = secure.certificate
    url = f"zookeeper://127.0.0.1:{secure.secure_port}"
    ours = f"{url}?ca={files.certificate}&cert={files.certificate}&key={files.key}"
    drive(flavour, _hold_often(ours, namespace, flavour))
    with waited_for(ours, namespace, flavour):
        pass
    with (
        holdfast.connect(f"{url}?tls=on", namespace=namespace) as locks,
        pytest.raises(BackendUnavailable),
    ):
        locks.lock("name").acquire(timeout=1)


async def _hold_often(url: str, namespace: str, flavour: Flavour) -> None:
    async with client(url, flavour, namespace) as locks:
        for _ in range(20):
            async with locks.lock("name") as lease:
                assert lease.held
        assert "CN=" not in repr(locks)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("zookeeper://", "no server"),
        ("zookeeper://host?surprise=1", "surprise"),
        ("zookeeper://host?auth=digest", "user:password"),
        ("zookeeper://host?auth=ticket", "digest, sasl or none"),
        ("zookeeper://host?auth=sasl&mechanism=GSSAPI", "Kerberos"),
        ("zookeeper://host?auth=sasl", "user:password"),
        ("zookeeper://host?tick=2000", "tickTime in seconds"),
        ("zookeeper://host?tls=off&ca=file", "tls=on"),
        ("zookeeper://host?tls=on&verify=off&check_hostname=on", "verify=on"),
        ("zookeeper://host/a/../b", "path"),
        ("zookeeper://host//a", "path"),
    ],
)
def test_an_invalid_url_is_refused(wrong: str, why: str) -> None:
    """When the store is opened, before any network access."""
    with pytest.raises(ValueError, match=why):
        open_store(wrong, Settings())


def test_credentials_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the URL has none; the password is not shown."""
    monkeypatch.setenv("HOLDFAST_ZOOKEEPER_USERNAME", "us")
    monkeypatch.setenv("HOLDFAST_ZOOKEEPER_PASSWORD", "s3cret")
    store = open_store("zookeeper://host1,host2:2182/path", Settings())
    assert isinstance(store, ZooKeeperStore)
    (acl,) = store.options.access.acl
    assert acl == Acl("digest", make_digest_acl_credential("us", "s3cret"))
    assert store.options.hosts == (("host1", 2181), ("host2", 2182))
    assert "s3cret" not in f"{store.display} {store.options!r}"
