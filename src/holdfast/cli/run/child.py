"""One run of a command under a lock: fed with certain time, given signals and the terminal, and
waited for until its whole process group is gone.

The process that is the command's parent, and ends it when we can't, is in ``guardian``.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from holdfast.cli.output.text import say
from holdfast.cli.run.command import Command
from holdfast.cli.run.group import ProcessGroup, end_group_of_lost_guardian
from holdfast.cli.run.guardian import Order, Report, now
from holdfast.cli.run.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class CommandLease(Protocol):
        """The part of a lease that is needed here: its certain time, and a callback for its
        loss."""

        @property
        def ttl(self) -> float: ...
        @property
        def remaining(self) -> float: ...
        @property
        def doubtful(self) -> bool: ...
        @property
        def lost(self) -> bool: ...
        def on_lost(self, callback: Callable[[str], object], /) -> object: ...


__all__ = ["TO_END", "Ending", "run_command"]

# How long before the end of certain time the command is asked to end, and when it is killed.
GRACE_SECONDS = 5.0
MARGIN_SECONDS = 0.5
# What is sent to end a program. HUP is, too, but means something else to many commands.
TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
# How often certain time is looked at: each time half of what is left, within these bounds.
LONGEST_LOOK_SECONDS = 1.0
SHORTEST_LOOK_SECONDS = 0.01


class Ending:
    """How a command ended. A plain class: a named tuple takes longer to make than to start."""

    __slots__ = ("code", "cut", "end_signal", "guarded", "interrupted", "lent")

    def __init__(
        self,
        code: int,
        *,
        cut: bool = False,
        interrupted: bool = False,
        lent: bool = False,
        guarded: bool = True,
        end_signal: int = 0,
    ) -> None:
        self.code = code
        """Its own exit code, or 128 + n if signal n ended it."""
        self.cut = cut
        """Whether it was made to end because the lock was no longer certain."""
        self.interrupted = interrupted
        """Whether Ctrl-C on our terminal ended it."""
        self.lent = lent
        """Whether the terminal was lent to it when it ended: our own job saw no Ctrl-C then."""
        self.guarded = guarded
        """Whether its guardian reported the end; else it was killed."""
        self.end_signal = end_signal
        """The signal that asked this program to end (of ``TO_END``, or HUP); 0 if none came."""


def run_command(command: Command, hold: CommandLease, environment: dict[str, str]) -> Ending:
    """Runs the command to the end of its process group; raises ``CannotRun``."""
    return _Run(command, hold, environment).to_the_end()


class _Run:
    """One run of a command."""

    def __init__(self, command: Command, hold: CommandLease, environment: dict[str, str]) -> None:
        self._command = command
        self._hold = hold
        self._environment = environment
        self._terminal: Terminal | None = None
        self._grace = min(GRACE_SECONDS, hold.ttl / 3)
        self._margin = min(MARGIN_SECONDS, hold.ttl / 20)
        self._sent_end = 0.0
        self._final = False  # it was asked to end: more certain time changes nothing
        self._group = 0
        self._status: int | None = None
        self._was_lent = False
        self._passed_interrupt = False
        self._end_signal = 0
        self._ending: Ending | None = None

    def to_the_end(self) -> Ending:
        wake_pipe = self._command.listen()
        self._hold.on_lost(lambda _reason: wake_pipe.wake())
        self._terminal = Terminal.find()
        look = self._feed()
        self._start()
        try:
            while self._ending is None:
                self._step(look)
                look = self._feed()
        finally:
            self._return_terminal()
        return self._ending

    def _return_terminal(self) -> None:
        if self._terminal is not None:
            self._terminal.take_back()
            if self._status is None or self._status < 0:  # it could not tidy up
                self._terminal.restore()
            self._terminal.close()

    def _start(self) -> None:
        lends = self._terminal is not None and self._terminal.suits
        if self._terminal is not None:
            self._terminal.remember()
            if lends:
                self._terminal.mark_lent()
        self._command.detach()
        pairs = [f"{name}={value}" for name, value in self._environment.items()]
        self._command.tell(Order.START, "1" if lends else "0", *pairs)

    def _feed(self) -> float:
        """Sends the guardian the certain time; returns the seconds to the next check."""
        before = now()  # read first: the end may only be reported too early
        remaining = self._hold.remaining
        if self._final:
            return LONGEST_LOOK_SECONDS
        if self._hold.lost:
            self._final = True
            self._command.tell(Order.KILL)
        elif abs(before + remaining - self._sent_end) > SHORTEST_LOOK_SECONDS:
            self._sent_end = before + remaining
            self._send_until(self._sent_end - self._grace)
        if self._hold.doubtful and not self._final:
            self._final = True
            self._send_until(before)
        left = remaining - self._grace
        return max(SHORTEST_LOOK_SECONDS, min(left / 2, LONGEST_LOOK_SECONDS))

    def _send_until(self, ask_at: float) -> None:
        kill_at = self._sent_end - self._margin
        self._command.tell(Order.UNTIL, repr(ask_at), repr(kill_at))

    def _step(self, seconds: float) -> None:
        reports, signals, guarded = self._command.read(seconds)
        if not guarded:
            self._kill_group()
            return
        for signum in signals:
            self._passed_interrupt |= signum == signal.SIGINT
            if signum in TO_END or (signum == signal.SIGHUP and not self._end_signal):
                self._end_signal = signum
            self._command.tell(Order.SIGNAL, str(signum))
        for name, field in reports:
            self._note(name, int(field))
        if self._status is not None and not reports and not signals:
            self._say_background()

    def _note(self, report: str, number: int) -> None:
        if report == Report.STARTED:
            self._group = number
        elif report == Report.FAILED:
            self._command.refuse(number)
        elif report == Report.STOPPED:
            self._stopped(number)
        elif report == Report.EXITED:
            self._status = os.waitstatus_to_exitcode(number)
            if self._terminal is not None:
                self._was_lent = self._terminal.lent
                self._terminal.take_back()
        elif report == Report.ENDED:
            self._ending = self._end(cut=bool(number))

    def _end(self, *, cut: bool) -> Ending:
        status = self._status or 0
        code = 128 - status if status < 0 else status
        pressed = self._was_lent or (self._terminal is not None and self._passed_interrupt)
        interrupted = pressed and status == -signal.SIGINT
        return Ending(
            code, cut=cut, interrupted=interrupted, lent=self._was_lent, end_signal=self._end_signal
        )

    # Stopping and going on

    def _stopped(self, signum: int) -> None:
        terminal = self._terminal
        if terminal is None:
            return  # no job control here: it was stopped on purpose, the lock is kept
        wants_it = signum in (signal.SIGTTIN, signal.SIGTTOU)
        if wants_it and terminal.ours and terminal.lend(self._group):
            self._command.tell(Order.SIGNAL, str(int(signal.SIGCONT)))
            return
        lent = terminal.lent
        terminal.take_back()
        _stop_own_job(signum)
        # Here again after fg, bg, or at once where nobody could continue us.
        self._feed()  # ends it instead if the lock has been lost since
        if (lent or wants_it) and terminal.ours:
            terminal.lend(self._group)
        self._command.tell(Order.SIGNAL, str(int(signal.SIGCONT)))

    def _say_background(self) -> None:
        if not self._final and self._group and self._terminal is not None:
            self._group = 0  # once
            say("the command has ended; its background processes keep the lock")

    def _kill_group(self) -> None:
        """The guardian was killed: kills the command's group, too."""
        group = ProcessGroup(self._group)
        group.reaped = True
        if self._group:
            end_group_of_lost_guardian(self._group)
            while group.member() is not None and self._hold.remaining > 0:
                time.sleep(SHORTEST_LOOK_SECONDS)
        self._ending = Ending(128 + signal.SIGKILL, guarded=False)


def _stop_own_job(signum: int) -> None:
    """Stops our whole job as the terminal would have done if the command were part of it.

    Returns when it is continued; at once in a job that nobody could continue, where the system
    drops the signal.
    """
    # SIGSTOP would also stop a job that nobody can continue.
    stop = signal.SIGTSTP if signum == signal.SIGSTOP else signum
    before = signal.signal(stop, signal.SIG_DFL)
    os.kill(0, stop)
    signal.signal(stop, before)
