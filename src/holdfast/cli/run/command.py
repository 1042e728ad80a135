"""A command line and the pipes to its guardian. What happens during a run is in ``child``."""

from __future__ import annotations

import errno
import os
import select
import signal
from typing import NoReturn

from holdfast.cli.exits import Refused
from holdfast.cli.run.guardian import Guardian, write_line
from holdfast.cli.run.signals import WakePipe, ignored_signals

__all__ = ["CannotRun", "Command", "locate"]


class CannotRun(Refused):
    """The command could not be started; the code is what a shell would answer."""


def locate(name: str) -> str:
    """The file that a command's name stands for; raises ``CannotRun`` as a shell would answer."""
    places = [""] if "/" in name else os.get_exec_path()
    found = [path for place in places if os.path.isfile(path := os.path.join(place, name))]  # noqa: PTH113,PTH118
    for path in found:
        if os.access(path, os.X_OK):
            return path
    if found:
        raise CannotRun(f"{name}: not executable", 126)
    if "/" in name and os.path.isdir(name):  # noqa: PTH112 - pathlib is slow to import
        raise CannotRun(f"{name}: is a directory", 126)
    raise CannotRun(f"{name}: command not found", 127)


class Command:
    """A command line and its guardian, forked before there are threads or connections to copy."""

    def __init__(self, command: list[str], *, repeats: bool = False) -> None:
        """With ``repeats`` it may be run again, one run after the other."""
        self._name = command[0]
        self._repeats = repeats
        path = locate(command[0])
        _fill_standard_streams()
        orders, self._orders = os.pipe()
        self._reports, reports = os.pipe()
        ignored = ignored_signals()
        # No signal may find the new process before it has shielded itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._guardian = os.fork()
        if self._guardian == 0:
            os.close(self._orders)
            os.close(self._reports)
            guardian = Guardian(orders, reports, path, command, ignored=ignored, repeats=repeats)
            _serve(guardian, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(orders)
        os.close(reports)
        self._wake_pipe = WakePipe()
        self._poll = select.poll()
        self._poll.register(self._reports, select.POLLIN)
        self._poll.register(self._wake_pipe.fd, select.POLLIN)
        self._unread = b""

    def rest(self) -> None:
        """While nothing runs, signals that end a process raise ``Interrupted``."""
        self._wake_pipe.rest()

    def close(self) -> None:
        """Ends the guardian and waits for it; what still runs is ended by it first."""
        os.close(self._orders)
        os.waitpid(self._guardian, 0)
        os.close(self._reports)

    def tell(self, *fields: str) -> None:
        """Gives the guardian an order."""
        write_line(self._orders, *fields)

    def listen(self) -> WakePipe:
        """While a command runs, ``read`` returns the signals; any thread may use the pipe to wake
        it."""
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self._wake_pipe.listen()
        return self._wake_pipe

    def read(self, seconds: float) -> tuple[list[list[str]], list[int], bool]:
        """Reports, signals, and whether the guardian is there to send any."""
        ready = {fd for fd, _ in self._poll.poll(seconds * 1000)}
        lines: list[bytes] = []
        if self._reports in ready:
            data = os.read(self._reports, 65536)
            if not data:
                return [], [], False
            *lines, self._unread = (self._unread + data).split(b"\n")
        signals = self._wake_pipe.read() if self._wake_pipe.fd in ready else []
        return [os.fsdecode(line).split("\0") for line in lines], signals, True

    def refuse(self, number: int) -> NoReturn:
        """The command could not be executed although its file looked right."""
        if number == errno.ENOENT:
            raise CannotRun(f"{self._name}: it, or the interpreter it names, was not found", 127)
        raise CannotRun(f"{self._name}: {os.strerror(number)}", 126)

    def detach(self) -> None:
        """Lets go of the streams that the guardian gives to the command: others may wait for
        their end."""
        if not self._repeats:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            os.close(null)


def _serve(guardian: Guardian, mask: set[int | signal.Signals]) -> NoReturn:
    """In the guardian's process: never returns into the code that it was forked from."""
    try:
        guardian.shield()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        guardian.serve()
    finally:
        os._exit(0)


def _fill_standard_streams() -> None:
    """Keeps closed standard streams from being taken by our own pipes; the command, too, sees
    them closed."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, closed on exec
