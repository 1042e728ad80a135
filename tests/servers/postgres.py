"""PostgreSQL, and PgBouncer in front of it."""

import signal
import socket
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from servers.account import account, give_to
from servers.missing import program
from servers.process import Server
from servers.template import copy_template
from servers.tls import make_certificate

USER = "holdfast"
DATABASE = "postgres"


def binary(name: str) -> Path:
    return program(name, "postgresql", f"/usr/lib/postgresql/*/bin/{name}")


class PostgresServer(Server):
    """One server that trusts loopback, or asks for `password`. `settings` are its own."""

    name = "postgres"
    user = "postgres"
    # A fast shutdown: the default one waits for clients to leave.
    stop_signal = signal.SIGINT

    def __init__(
        self,
        *,
        password: str | None = None,
        tls: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.password = password
        self.tls = make_certificate(self.folder) if tls else None
        self.settings = {
            "listen_addresses": self.host,
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
            "max_connections": "200",
            **(settings or {}),
        }
        if self.tls:
            self.settings |= {"ssl": "on", "ssl_cert_file": str(self.tls.certificate)}
            self.settings |= {"ssl_key_file": str(self.tls.key)}

    def prepare(self) -> None:
        if self.password is None:
            copy_template("postgres", binary("postgres"), _initdb, self.data)
        else:
            _initdb(self.data, self.password)

    def command(self) -> list[str | Path]:
        words: list[str | Path] = [binary("postgres"), "-D", self.data]
        for key, value in self.settings.items():
            words += ["-c", f"{key}={value}"]
        return words

    def answers(self) -> bool:
        return _greets(self.host, self.port)

    def url_at(self, port: int) -> str:
        login = USER if self.password is None else f"{USER}:{quote(self.password, safe='')}"
        trust = f"?sslmode=verify-full&sslrootcert={self.tls.certificate}" if self.tls else ""
        return f"postgresql://{login}@{self.host}:{port}/{DATABASE}{trust}"


class PgBouncer(Server):
    """A pooler in front of a server; a transaction may run on any of its connections."""

    name = "pgbouncer"
    user = "postgres"
    # The default is to wait for clients to leave.
    stop_signal = signal.SIGTERM

    def __init__(
        self, server: PostgresServer, *, pool: int = 20, mode: str = "transaction"
    ) -> None:
        super().__init__()
        target = f"host={server.host} port={server.port} user={USER}"
        self.lines = [
            "[databases]",
            f"* = {target} password={server.password}" if server.password else f"* = {target}",
            "[pgbouncer]",
            f"listen_addr = {self.host}",
            f"listen_port = {self.port}",
            "unix_socket_dir =",
            "auth_type = any",
            f"pool_mode = {mode}",
            f"default_pool_size = {pool}",
            "max_client_conn = 500",
            "ignore_startup_parameters = extra_float_digits,options",
        ]

    def command(self) -> list[str | Path]:
        file = self.folder / "pgbouncer.ini"
        file.write_text("\n".join(self.lines) + "\n")
        return [program("pgbouncer", "pgbouncer"), file]

    def answers(self) -> bool:
        return _greets(self.host, self.port)

    def url_at(self, port: int) -> str:
        return f"postgresql://{USER}@{self.host}:{port}/{DATABASE}"


def _initdb(target: Path, password: str | None = None) -> None:
    user = account(PostgresServer.user)
    words: list[str | Path] = [binary("initdb"), "-D", target, "-U", USER, "--no-sync"]
    words += ["--locale=C.UTF-8", "--encoding=UTF8"]
    if password is None:
        words += ["--auth=trust"]
    else:
        file = target.parent / "password"
        file.write_text(password + "\n")
        words += ["--auth=scram-sha-256", f"--pwfile={file}"]
    give_to(target.parent, user)
    groups: list[str] | None = None if user is None else []
    subprocess.run(
        words, check=True, capture_output=True, user=user, group=user, extra_groups=groups, cwd="/"
    )


def _greets(host: str, port: int) -> bool:
    """Whether a login is answered with anything but an error, such as that it is still starting."""
    words = f"user\0{USER}\0database\0{DATABASE}\0\0".encode()
    with socket.create_connection((host, port), timeout=2) as wire:
        wire.sendall(struct.pack("!ii", 8 + len(words), 196_608) + words)
        return wire.recv(1) == b"R"
