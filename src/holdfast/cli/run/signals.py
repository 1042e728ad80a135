"""Signals: an interruption while waiting for a lock, bytes on a pipe while a command runs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from types import FrameType

__all__ = ["ENDING", "PASSED", "Interrupted", "WakePipe", "ignored_signals"]

# These end a process that does nothing about them.
ENDING = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
# These are passed on to the command.
PASSED = (*ENDING, signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP)


class Interrupted(KeyboardInterrupt):
    """A signal that ends us arrived: what was begun is undone, as after Ctrl-C."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def ignored_signals() -> frozenset[int]:
    """What the caller wants ignored (``nohup``, a shell's background job): it stays that way."""
    return frozenset(
        signum for signum in signal.valid_signals() if signal.getsignal(signum) is signal.SIG_IGN
    ) - {signal.SIGPIPE, signal.SIGXFSZ}  # ignored by Python itself


def _interrupt_on(signals: Iterable[int]) -> None:
    """Makes the first of these signals raise ``Interrupted``; the undoing is left in peace."""
    raised = False

    def interrupt(signum: int, _: FrameType | None) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise Interrupted(signum)

    for signum in signals:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, interrupt)


class WakePipe:
    """A pipe that any thread may write to, and to which signals write their number."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        """Wakes the thread that polls ``fd``. From any thread."""
        with contextlib.suppress(BlockingIOError):  # full: a wake-up is pending already
            os.write(self._write_fd, b"\0")

    def read(self) -> list[int]:
        """The signals that arrived, in order."""
        try:
            return [number for number in os.read(self.fd, 4096) if number]
        except BlockingIOError:
            return []

    def listen(self) -> None:
        """From now on, signals that are passed on only write to the pipe."""
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in PASSED:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, _nothing)

    def rest(self) -> None:
        """From now on, signals that end a process interrupt it, and others do what they always do.

        A signal that arrived and was not read yet interrupts at once.
        """
        _interrupt_on(ENDING)
        for signum in (signal.SIGTSTP, signal.SIGWINCH, signal.SIGCONT):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        for number in self.read():
            if number in ENDING:
                raise Interrupted(number)
        signal.set_wakeup_fd(-1)


def _nothing(_signum: int, _frame: FrameType | None) -> None:
    pass
