"""ZooKeeper servers with special settings, three servers whose links can be cut, and fixtures.

A test module uses a fixture by assigning it: ``server, locks = helpers.server, helpers.locks``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

import holdfast
from holdfast.stores.zookeeper.session import ZooKeeperSession
from servers.ensemble import Trio
from servers.pump import Pump
from servers.registry import Servers
from servers.tls import Certificate, make_certificate
from servers.zookeeper import ZooKeeperServer

__all__ = [
    "TICK_MS",
    "TICK_SECONDS",
    "TTL",
    "LinkedZooKeeperTrio",
    "QuickServer",
    "SaslServer",
    "SecureServer",
    "ShortSessionsServer",
    "hold",
    "locks",
    "nodes_of",
    "others",
    "server",
    "session_of",
]

_MISSING_JARS = "/usr/share/java/netty-codec.jar:/usr/share/java/netty-resolver.jar"
TICK_MS = 200
TICK_SECONDS = TICK_MS / 1000
TICK = f"?tick={TICK_SECONDS:g}"
TTL = 20


class QuickServer(ZooKeeperServer):
    """Short ticks, and unused names are deleted soon."""

    def __init__(self, *, tick_ms: int = TICK_MS) -> None:
        super().__init__(tick_ms=tick_ms)

    def command(self) -> list[str | Path]:
        java, *rest = super().command()
        return [java, "-Dznode.container.checkIntervalMs=500", *rest]

    def connections(self) -> int:
        """How many clients are connected, without the connection of this command."""
        return len([line for line in self.ask("cons").splitlines() if "sid=" in line])


@pytest.fixture
def server(servers: Servers) -> QuickServer:
    """The server that most tests use together, each in a namespace of its own."""
    return servers.of(QuickServer)


@pytest.fixture
def locks(server: QuickServer, namespace: str) -> Iterator[holdfast.Locks]:
    with holdfast.connect(server.url, namespace=namespace, ttl=TTL) as opened:
        yield opened


@pytest.fixture
def others(server: QuickServer, namespace: str) -> Iterator[holdfast.Locks]:
    """A second client."""
    with holdfast.connect(server.url, namespace=namespace, ttl=TTL) as opened:
        yield opened


def hold(locks: holdfast.Locks, name: str) -> int:
    """Acquires and releases a lock; returns the token."""
    with locks.lock(name, timeout=60.0) as lease:
        return lease.token


class ShortSessionsServer(ZooKeeperServer):
    """Long ticks, and sessions that may be shorter than two of them."""

    def __init__(self) -> None:
        super().__init__(tick_ms=3000)

    def _configuration(self) -> list[str]:
        return [*super()._configuration(), "minSessionTimeout=500"]


class SecureServer(QuickServer):
    """Uses TLS on a second port, and requires client certificates."""

    def __init__(self) -> None:
        super().__init__()
        self.secure_port = self.another_port()

    @property
    def certificate(self) -> Certificate:
        return make_certificate(self.folder)

    def command(self) -> list[str | Path]:
        # Debian's zookeeper.jar names only some of the jars that TLS needs.
        command = super().command()
        path = command.index("-cp") + 1
        command[path] = f"{command[path]}:{_MISSING_JARS}"
        return command

    def _configuration(self) -> list[str]:
        made = self.certificate
        both = self.folder / "both.pem"
        both.write_text(made.key.read_text() + made.certificate.read_text())
        return [
            *super()._configuration(),
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
            f"secureClientPort={self.secure_port}",
            f"secureClientPortAddress={self.host}",
            f"ssl.keyStore.location={both}",
            "ssl.keyStore.type=PEM",
            f"ssl.trustStore.location={made.certificate}",
            "ssl.trustStore.type=PEM",
            "ssl.clientAuth=need",
        ]


class SaslServer(QuickServer):
    """Has the user ``us`` with the password ``s3cret``."""

    def command(self) -> list[str | Path]:
        file = self.folder / "jaas.conf"
        module = "org.apache.zookeeper.server.auth.DigestLoginModule"
        file.write_text(f'Server {{ {module} required user_us="s3cret"; }};\n')
        java, *rest = super().command()
        return [java, f"-Djava.security.auth.login.config={file}", *rest]

    def _configuration(self) -> list[str]:
        provider = "org.apache.zookeeper.server.auth.SASLAuthenticationProvider"
        return [*super()._configuration(), f"authProvider.1={provider}"]


class LinkedServer(ZooKeeperServer):
    """A server that reaches the others only through links.

    Servers send each other their addresses. So all have the same host names in their configuration,
    and each has its own hosts file, which maps the other names to its links to them.
    """

    def __init__(self, *, tick_ms: int = TICK_MS) -> None:
        super().__init__(tick_ms=tick_ms)
        self.links: dict[int, list[Pump]] = {}

    def link(self) -> None:
        for other in self.members:
            if other is not self:
                ports = other.quorum_port, other.election_port
                host = self._address_of(other)
                self.links[other.number] = [Pump(p, (other.host, p), host=host) for p in ports]

    def _address_of(self, other: ZooKeeperServer) -> str:
        return self.host if other is self else f"127.0.{self.number}.{other.number}"

    def command(self) -> list[str | Path]:
        hosts = self.folder / "hosts"
        lines = [f"{self._address_of(m)} server-{m.number}\n" for m in self.members]
        hosts.write_text("".join(lines))
        java, *rest = super().command()
        return [java, f"-Djdk.net.hosts.file={hosts}", *rest]

    def _configuration(self) -> list[str]:
        lines = [line for line in super()._configuration() if not line.startswith("server.")]
        for number, member in enumerate(self.members, 1):
            address = f"server-{number}:{member.quorum_port}:{member.election_port}"
            lines.append(f"server.{number}={address}")
        return lines

    def close(self) -> None:
        super().close()
        for pump in chain.from_iterable(self.links.values()):
            pump.do(lambda pump=pump: setattr(pump, "ending", True))  # type: ignore[misc]
            pump.join()
        self.links.clear()


class LinkedZooKeeperTrio(Trio[LinkedServer]):
    """Three servers in one ensemble."""

    suffix = TICK

    def __init__(self) -> None:
        nodes = [LinkedServer() for _ in range(3)]
        for node in nodes:
            node.members = list(nodes)
        for node in nodes:
            node.link()
        super().__init__(nodes)

    def leads(self, node: LinkedServer) -> bool | None:
        return node.is_leader()

    def term_of(self, node: LinkedServer) -> int:
        return node.term()

    def left(self, namespace: str) -> list[str]:
        """All nodes below the names of a namespace. The servers delete the names themselves."""
        client = KazooClient(self.hosts)
        client.start()
        try:
            client.sync("/")
            names = f"/{namespace}/locks"
            paths = [f"{names}/{name}" for name in nodes_of(client, names)]
            return [f"{path}/{node}" for path in paths for node in nodes_of(client, path)]
        finally:
            client.stop()
            client.close()

    def isolate(self, isolated: LinkedServer) -> None:
        """Stops all traffic between this server and the others, without closing connections."""
        self._stall(isolated, True)

    def join(self, isolated: LinkedServer) -> None:
        self._stall(isolated, False)

    def _stall(self, isolated: LinkedServer, stalled: bool) -> None:
        for node in self.nodes:
            for number, pumps in node.links.items():
                for pump in pumps if node is isolated or number == isolated.number else ():
                    pump.do(lambda pump=pump: setattr(pump, "stalled", stalled))  # type: ignore[misc]

    def delay(self, late: LinkedServer, seconds: float) -> None:
        """Everything between this server and the others takes this much longer, each way."""
        for node in self.nodes:
            for number, pumps in node.links.items():
                for pump in pumps if node is late or number == late.number else ():
                    pump.do(lambda pump=pump: setattr(pump, "added_delay", seconds))  # type: ignore[misc]

    def mend(self) -> None:
        """Everything runs and is connected again."""
        for node in self.nodes:
            self.join(node)
            self.delay(node, 0.0)
            if node.alive and node.paused:
                node.resume()
        self.launch()
        self.wait_ready()
        self.wait_settled()


def nodes_of(kazoo: KazooClient, path: str) -> list[str]:
    """The nodes of a name; none if the name is not in use."""
    try:
        nodes: list[str] = kazoo.get_children(path)
    except NoNodeError:
        return []
    return nodes


def session_of(locks: holdfast.Locks, ttl: int) -> ZooKeeperSession:
    """The session of a client's holds with that ttl."""
    with locks.lock("first"):
        pass
    session = locks._engine.store.sessions[ttl]  # type: ignore[attr-defined]
    assert isinstance(session, ZooKeeperSession)
    return session
