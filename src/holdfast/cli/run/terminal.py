"""The controlling terminal: whose turn it is, and what it looked like before."""

from __future__ import annotations

import contextlib
import os
from typing import Any

__all__ = ["Terminal"]


class Terminal:
    """The terminal that this process belongs to, lent to the command's process group.

    All of it presumes that SIGTTOU is ignored: giving and taking is done from the background too.
    """

    @classmethod
    def find(cls) -> Terminal | None:
        """The controlling terminal, or ``None`` where there is none: cron, a service, CI."""
        try:
            return cls(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        except OSError:
            return None

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lent = False
        self._looks: list[Any] | None = None

    @property
    def ours(self) -> bool:
        """Whether our own job is in the foreground."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # hung up
            return False

    @property
    def suits(self) -> bool:
        """Whether the command should have it from the start: it is ours, and nobody else in our
        job seems to use it. In a pipeline with a pager the pager needs it more."""
        return self.ours and os.isatty(0) and os.isatty(1)

    def remember(self) -> None:
        """Keeps its settings: a command that is killed can't put them back."""
        import termios

        with contextlib.suppress(termios.error):
            self._looks = termios.tcgetattr(self._fd)

    def lend(self, group: int) -> bool:
        """Puts the command's group into the foreground; returns whether it worked."""
        try:
            os.tcsetpgrp(self._fd, group)
        except OSError:
            return False
        self._lent = True
        return True

    def mark_lent(self) -> None:
        """The command took it by itself, before anything of it ran."""
        self._lent = True

    @property
    def lent(self) -> bool:
        return self._lent

    def take_back(self) -> None:
        """Puts our own job into the foreground if the terminal was lent."""
        if self._lent:
            self._lent = False
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self._fd, os.getpgrp())

    def restore(self) -> None:
        """Puts its settings back as they were remembered."""
        if self._looks is not None:
            import termios

            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._looks)

    def close(self) -> None:
        os.close(self._fd)
