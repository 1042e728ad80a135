"""MariaDB, which speaks MySQL's protocol."""

import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from servers.account import account, give_to
from servers.missing import program
from servers.process import Server
from servers.template import copy_template

USER = "holdfast"
DATABASE = "holdfast"


class MySQLServer(Server):
    """One server with a user and a database of our own. `arguments` are added to its command."""

    name = "mysql"
    user = "mysql"

    def __init__(self, *, password: str = "secret", arguments: Sequence[str] = ()) -> None:
        super().__init__()
        self.password = password
        self.arguments = list(arguments)

    def prepare(self) -> None:
        copy_template("mysql", _binary(), _install, self.data)

    def command(self) -> list[str | Path]:
        setup = self.folder / "setup.sql"
        # Run at every start, before the first connection is let in.
        setup.write_text(
            f"CREATE DATABASE IF NOT EXISTS {DATABASE};\n"
            f"CREATE OR REPLACE USER '{USER}'@'%' IDENTIFIED BY '{self.password}';\n"
            f"GRANT ALL ON *.* TO '{USER}'@'%';\n"
        )
        words: list[str | Path] = [_binary(), "--no-defaults", f"--datadir={self.data}"]
        # Not one for all: a server that starts deletes what it takes for its own temporary tables
        # in there, and one that loses a table so while it uses it crashes.
        words += [f"--tmpdir={self.folder}"]
        words += [f"--port={self.port}", f"--bind-address={self.host}", f"--init-file={setup}"]
        words += [f"--socket={self.folder / 'mysql.sock'}", f"--pid-file={self.folder / 'pid'}"]
        words += ["--skip-name-resolve", "--innodb-buffer-pool-size=64M", "--max-connections=300"]
        return words + list(self.arguments)

    def answers(self) -> bool:
        with socket.create_connection((self.host, self.port), timeout=2) as wire:
            # The fifth byte of the greeting is the protocol's version, or 255 for an error.
            return wire.recv(5)[4:] == b"\x0a"

    def url_at(self, port: int) -> str:
        return f"mysql://{USER}:{self.password}@{self.host}:{port}/{DATABASE}"


def _binary() -> Path:
    return program("mariadbd", "mariadb-server", "/usr/sbin/mariadbd")


def _install(target: Path) -> None:
    tool = program("mariadb-install-db", "mariadb-server")
    user = account(MySQLServer.user)
    give_to(target.parent, user)
    words: list[str | Path] = [tool, "--no-defaults", f"--datadir={target}", "--skip-test-db"]
    words += ["--auth-root-authentication-method=normal", "--innodb-log-file-size=16M"]
    words += [f"--tmpdir={target.parent}"]
    groups: list[str] | None = None if user is None else []
    subprocess.run(
        words, check=True, capture_output=True, user=user, group=user, extra_groups=groups, cwd="/"
    )
