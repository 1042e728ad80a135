"""A terminal with a shell in it, as a person uses it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time

from cli.processes import HANG_SECONDS, Cli


class Shell:
    """An interactive bash on a terminal of its own."""

    def __init__(self, cli: Cli) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            environment = {**cli.environment, "PS1": "ready$ ", "TERM": "dumb"}
            environment.pop("COLUMNS", None)  # the terminal's own width counts
            os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        self.holdfast = " ".join(cli.command)
        self._seen = ""
        self.expect(r"ready\$ ")

    def type(self, text: str) -> None:
        """Presses keys."""
        os.write(self._fd, text.encode())

    def expect(self, pattern: str) -> str:
        """Waits until the screen shows it after all that was expected before; answers the text."""
        end = time.monotonic() + HANG_SECONDS
        while (match := re.search(pattern, self._seen)) is None:
            assert time.monotonic() < end, f"{pattern!r} never came: {self._seen!r}"
            if select.select([self._fd], [], [], 1)[0]:
                self._seen += os.read(self._fd, 65536).decode(errors="replace")
        self._seen = self._seen[match.end() :]
        return match[0]

    def resize(self, columns: int, lines: int) -> None:
        """Changes the size of the window, as a person does."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def run(self, line: str) -> None:
        """Types a line and waits for its echo."""
        self.type(f"{line}\n")
        self.expect(r"\r\n")

    def prompt(self) -> None:
        """Waits for the shell to be ready."""
        self.expect(r"ready\$ ")

    def end(self) -> None:
        """Closes the window: the shell hangs up on its jobs, and ends."""
        os.close(self._fd)
        os.waitpid(self.pid, 0)
