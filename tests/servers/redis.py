"""Redis, alone or as a replica."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from servers.missing import program
from servers.process import Server, wait_until
from servers.resp import RedisError, Reply, ask
from servers.tls import Certificate, make_certificate


class RedisServer(Server):
    """`redis-server` with nothing on disk unless asked; `persist` turns on the append-only file.

    `users` are ACL lines ("alice on >secret ~* &* +@all"), `arguments` further command-line ones.
    `tls` may be a certificate that several servers share.
    """

    name = "redis"

    def __init__(
        self,
        *,
        persist: bool = False,
        replica_of: "RedisServer | None" = None,
        tls: bool | Certificate = False,
        password: str | None = None,
        users: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.persist = persist
        self.replica_of = replica_of
        self.password = password
        self.users = list(users)
        self.arguments = list(arguments)
        self.socket = self.folder / "redis.sock"
        self.tls = make_certificate(self.folder) if tls is True else tls or None

    def binary(self) -> Path:
        return program("redis-server", "redis-server")

    def command(self) -> list[str | Path]:
        words: list[str | Path] = [self.binary(), "--bind", self.host, "--dir", self.data]
        words += ["--unixsocket", self.socket, "--save", "", "--daemonize", "no"]
        words += ["--appendonly", "yes" if self.persist else "no", "--appendfsync", "always"]
        words += ["--enable-debug-command", "yes", "--protected-mode", "no"]
        # A master would wait five seconds for more replicas before it sends the first its data.
        words += ["--repl-diskless-sync-delay", "0"]
        if self.tls:
            words += ["--port", "0", "--tls-port", str(self.port)]
            words += [word for key, value in self.tls.words for word in (f"--{key}", value)]
        else:
            words += ["--port", str(self.port)]
        if self.replica_of:
            words += ["--replicaof", self.replica_of.host, str(self.replica_of.port)]
        if self.password:
            words += ["--requirepass", self.password, "--masterauth", self.password]
        for user in self.users:
            words += ["--user", *user.split()]
        return words + list(self.arguments)

    def answers(self) -> bool:
        try:
            return self.ask("PING") == "PONG"
        except RedisError as error:
            # Asking for a login is an answer; loading a file is not yet one.
            return str(error).startswith("NOAUTH")

    def ask(self, *words: str) -> Reply:
        """Asks the server something, as the default user."""
        trust = self.tls.certificate if self.tls else None
        return ask(self.host, self.port, *words, trust=trust, password=self.password)

    def url_at(self, port: int) -> str:
        scheme = "rediss" if self.tls else "redis"
        login = f":{quote(self.password, safe='')}@" if self.password else ""
        trust = f"?ssl_ca_certs={self.tls.certificate}" if self.tls else ""
        return f"{scheme}://{login}{self.host}:{port}/0{trust}"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket}?db=0"

    def wait_linked(self) -> None:
        """Returns when this replica follows its master."""
        wait_until(self.name, lambda: "master_link_status:up" in str(self.ask("INFO")))
