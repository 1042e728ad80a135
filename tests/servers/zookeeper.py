"""ZooKeeper, one server or three, from the jars of Debian's package."""

import socket
from pathlib import Path

from servers.ensemble import Trio
from servers.missing import ServerMissing, program
from servers.process import Server

_MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
_JAR = Path("/usr/share/java/zookeeper.jar")
# Short-lived and small: the quick compiler alone, and no parallel collector on a shared machine.
_JAVA = ["-Xmx192m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto"]
# A server that missed a vote repeats its own after 0.2 s, 0.4 s, ... 60 s: on a busy machine an
# election would take a minute.
_NOTIFICATION = "-Dzookeeper.fastleader.maxNotificationInterval=1000"
_LOG4J = """log4j.rootLogger=WARN, console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %-5p %c{1} %m%n
"""


class ZooKeeperServer(Server):
    """One server. The shortest session is two ticks, so `tick_ms=500` allows one of a second;
    the longest one has `longest_ms`."""

    name = "zookeeper"

    def __init__(self, *, tick_ms: int = 500, longest_ms: int = 60_000) -> None:
        super().__init__()
        self.tick_ms, self.longest_ms = tick_ms, longest_ms
        self.quorum_port, self.election_port = self.another_port(), self.another_port()
        self.members: list[ZooKeeperServer] = [self]

    @property
    def number(self) -> int:
        return self.members.index(self) + 1

    def prepare(self) -> None:
        (self.data / "myid").write_text(f"{self.number}\n")

    def command(self) -> list[str | Path]:
        java = program("java", "default-jre-headless")
        if not _JAR.exists():
            raise ServerMissing("zookeeper", "zookeeper")
        (self.folder / "log4j.properties").write_text(_LOG4J)
        file = self.folder / "zoo.cfg"
        file.write_text("\n".join(self._configuration()) + "\n")
        # Our folder comes first, or the package's settings would log where only root may.
        path = f"{self.folder}:{_JAR}"
        options = ["-Dzookeeper.admin.enableServer=false", _NOTIFICATION]
        return [java, *_JAVA, *options, "-cp", path, _MAIN, file]

    def _configuration(self) -> list[str]:
        lines = [
            f"tickTime={self.tick_ms}",
            f"dataDir={self.data}",
            f"clientPort={self.port}",
            f"clientPortAddress={self.host}",
            "initLimit=20",
            "syncLimit=10",
            f"maxSessionTimeout={self.longest_ms}",
            "maxClientCnxns=0",
            "4lw.commands.whitelist=*",
        ]
        if len(self.members) > 1:
            lines += [
                f"server.{m.number}={m.host}:{m.quorum_port}:{m.election_port}"
                for m in self.members
            ]
        return lines

    def mode(self) -> str:
        """`standalone`, `leader`, `follower`, or nothing while there is no quorum."""
        return self._says("Mode")

    def term(self) -> int:
        """The number of the last election; 0 while there is no quorum."""
        return int(self._says("Zxid") or "0", 16) >> 32

    def _says(self, word: str) -> str:
        lines = self.ask("srvr", seconds=1.0).splitlines()
        start = f"{word}: "
        return next((line.removeprefix(start) for line in lines if line.startswith(start)), "")

    def is_leader(self) -> bool | None:
        """None while there is no quorum."""
        return {"leader": True, "follower": False}.get(self.mode())

    def answers(self) -> bool:
        return self.mode() != ""

    def ask(self, word: str, *, seconds: float = 10.0) -> str:
        """A four-letter word, such as `mntr` or `cons`."""
        with socket.create_connection((self.host, self.port), timeout=seconds) as wire:
            wire.sendall(word.encode())
            with wire.makefile("rb") as reply:
                return reply.read().decode()

    def url_at(self, port: int) -> str:
        return f"zookeeper://{self.host}:{port}"


class ZooKeeperTrio(Trio[ZooKeeperServer]):
    """Three servers in one ensemble."""

    def __init__(self, *, tick_ms: int = 500, longest_ms: int = 60_000) -> None:
        nodes = [ZooKeeperServer(tick_ms=tick_ms, longest_ms=longest_ms) for _ in range(3)]
        for node in nodes:
            node.members = nodes
        super().__init__(nodes)

    def leads(self, node: ZooKeeperServer) -> bool | None:
        return node.is_leader()

    def term_of(self, node: ZooKeeperServer) -> int:
        return node.term()
