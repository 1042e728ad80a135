"""Consul, one server or three."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from servers import http
from servers.ensemble import Trio
from servers.missing import program
from servers.process import Server
from servers.tls import Certificate, make_certificate


class ConsulServer(Server):
    """One server agent. `session_ttl_min` is Consul's own floor for session ttls ("10s" there).

    `config` is merged into the agent's configuration, for ACLs and the like.
    """

    name = "consul"

    def __init__(
        self,
        *,
        session_ttl_min: str = "1s",
        tls: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.session_ttl_min = session_ttl_min
        self.config = dict(config or {})
        self.server_port, self.serf_port = self.another_port(), self.another_port()
        self.address = self.host
        """Where other servers reach it."""
        self.node_id = str(uuid4())
        self.members: list[ConsulServer] = [self]
        self.tls: Certificate | None = make_certificate(self.folder) if tls else None

    def command(self) -> list[str | Path]:
        file = self.folder / "consul.json"
        file.write_text(json.dumps(self._configuration()))
        # `.json` in the folder only: an agent reads no other configuration by itself.
        return [program("consul", "consul"), "agent", "-server", f"-config-file={file}"]

    def _configuration(self) -> dict[str, Any]:
        # Ports that are not used are off, so that nothing of another agent's is met by accident.
        ports = {"dns": -1, "grpc": -1, "serf_wan": -1, "http": self.port, "https": -1}
        ports |= {"server": self.server_port, "serf_lan": self.serf_port}
        settings: dict[str, Any] = {"ports": ports, "log_level": "WARN"}
        if self.tls:
            ports |= {"http": -1, "https": self.port}
            settings["cert_file"] = str(self.tls.certificate)
            settings["key_file"] = str(self.tls.key)
        others = [f"{m.host}:{m.serf_port}" for m in self.members if m is not self]
        return {
            **settings,
            "node_name": f"node-{self.port}",
            "node_id": self.node_id,
            "data_dir": str(self.data),
            "bind_addr": self.host,
            "client_addr": self.host,
            "bootstrap_expect": len(self.members),
            "retry_join": others,
            "retry_interval": "200ms",
            "session_ttl_min": self.session_ttl_min,
            "performance": {"raft_multiplier": 1},
            "disable_update_check": True,
            "leave_on_terminate": False,
            **self.config,
        }

    def answers(self) -> bool:
        # The leader's address is known before it takes writes, so a write is the question.
        return self._leader() != "" and self._writes()

    def _writes(self) -> bool:
        if "acl" in self.config:
            return True
        path = "/v1/kv/holdfast-tests/ready"
        return bool(self.ask(path, "", method="PUT", seconds=http.LOOK_SECONDS))

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        seconds: float = http.ANSWER_SECONDS,
    ) -> Any:
        """One request to this agent's HTTP API."""
        scheme = "https" if self.tls else "http"
        trust = self.tls.certificate if self.tls else None
        url = f"{scheme}://{self.host}:{self.port}{path}"
        return http.ask(url, body, method=method, trust=trust, seconds=seconds)

    def is_leader(self) -> bool | None:
        """None while there is no leader."""
        address = self._leader()
        return address == f"{self.address}:{self.server_port}" if address else None

    def term(self) -> int:
        """The number of the last election."""
        found = self.ask("/v1/agent/self", seconds=http.LOOK_SECONDS)
        return int(found["Stats"]["raft"]["term"])

    def _leader(self) -> str:
        return str(self.ask("/v1/status/leader", seconds=http.LOOK_SECONDS))

    def url_at(self, port: int) -> str:
        if self.tls:
            return f"consuls://{self.host}:{port}?ca={self.tls.certificate}"
        return f"consul://{self.host}:{port}"


class ConsulTrio(Trio[ConsulServer]):
    """Three servers in one datacenter."""

    def __init__(self, *, session_ttl_min: str = "1s") -> None:
        nodes = [ConsulServer(session_ttl_min=session_ttl_min) for _ in range(3)]
        for node in nodes:
            node.members = nodes
        super().__init__(nodes)

    def leads(self, node: ConsulServer) -> bool | None:
        return node.is_leader()

    def term_of(self, node: ConsulServer) -> int:
        return node.term()
