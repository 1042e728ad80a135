"""The guardian: a small process between ``holdfast`` and the command that it runs.

It is the command's parent, so it always knows whether the command's process group is still that
one. It lives in a process group of its own, so what is sent to the command or to ``holdfast``,
also to the whole of their groups, does not reach it. It ends the command's group when the pipe
from ``holdfast`` breaks, and when the lock's certain time is nearly over and was not extended,
even if ``holdfast`` itself hangs or is stopped.

Lines come down one pipe (``Order``) and go up another (``Report``); fields are parted by NUL.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence

from holdfast.cli.run.group import ProcessGroup

__all__ = ["Guardian", "Order", "Report", "now", "write_line"]

# How long a command may take to end when ``holdfast`` was killed; never past its certain time.
ORPHAN_GRACE_SECONDS = 3.0
# Sleeping does not count while the machine is suspended, certain time does: look up often enough.
LONGEST_NAP_SECONDS = 1.0
KILL_AGAIN_SECONDS = 0.5
# Where the end of a group can't be waited for, it is looked at so often.
LOOK_SECONDS = 0.1

# Only the end of the pipe and the clock end a guardian, whatever is sent to it by mistake.
SHIELDED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
)
# Python ignores these for itself; a command expects them as they were.
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds on a clock that both processes read alike and that runs on during suspend."""
    return time.clock_gettime(_CLOCK)


def write_line(fd: int, *fields: str) -> None:
    """Sends one line; a reader that is gone is not an error, its end is noticed elsewhere."""
    data = os.fsencode("\0".join(fields)) + b"\n"
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(fd, data) :]


class Order:
    """What ``holdfast`` tells the guardian."""

    START = "start"  # 1 or 0: gives it the terminal; then NAME=VALUE for the environment …
    UNTIL = "until"  # when to ask the command to end, when to kill it
    KILL = "kill"  # at once
    SIGNAL = "signal"  # which


class Report:
    """What the guardian tells ``holdfast``."""

    STARTED = "started"  # the process group, before the command runs
    FAILED = "failed"  # errno
    STOPPED = "stopped"  # by which signal
    EXITED = "exited"  # the command's wait status
    ENDED = "ended"  # the whole group is gone; 1 if certain time ended it


class Guardian:
    """Runs one command, or one after the other until its pipe breaks."""

    def __init__(
        self,
        orders: int,
        reports: int,
        path: str,
        command: list[str],
        *,
        ignored: frozenset[int],
        repeats: bool,
    ) -> None:
        self._orders = orders
        self._reports = reports
        self._path = path
        self._command = command
        self._ignored = ignored
        self._repeats = repeats
        self._parent = os.getppid()
        self._unread = b""
        self._group: ProcessGroup | None = None
        self._orphaned = False
        self._done = False
        self._asked = False  # certain time is nearly over, and the group was asked to end
        self._stopped = False
        self._ask_at = self._kill_at = float("inf")
        self._witness: int | None = None  # a pidfd of one who lives on after the leader
        self._poll = select.poll()
        self._children = -1

    def shield(self) -> None:
        """Leaves the process group and ignores signals, which are still blocked."""
        os.setpgid(0, 0)
        for signum in SHIELDED:
            signal.signal(signum, signal.SIG_IGN)
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:  # noqa: PTH123
            file.write("holdfast-guard")

    def serve(self) -> None:
        """Returns when no command is left, and no other will come or can be asked for."""
        self._children, wake_fd = os.pipe()
        os.set_blocking(wake_fd, False)
        os.set_blocking(self._children, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        self._poll.register(self._orders, select.POLLIN)
        self._poll.register(self._children, select.POLLIN)
        while self._group is not None or not (self._orphaned or self._done):
            self._once()

    def _once(self) -> None:
        ready = {fd for fd, _ in self._poll.poll(self._nap_milliseconds())}
        if self._orders in ready:
            self._read_orders()
        if self._children in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._children, 4096)
        if self._group is not None:
            self._enforce(self._group)
            self._look_after(self._group)

    def _nap_milliseconds(self) -> float | None:
        if self._group is None:
            return None
        looking = self._group.reaped and self._witness is None
        nap = LOOK_SECONDS if looking else LONGEST_NAP_SECONDS
        due = self._kill_at if self._asked else min(self._ask_at, self._kill_at)
        return max(0.0, min(nap, due - now())) * 1000

    # Orders

    def _read_orders(self) -> None:
        data = os.read(self._orders, 65536)
        if not data:
            self._poll.unregister(self._orders)
            self._orphaned = True
            self._ask_at = now()
            self._kill_at = min(self._kill_at, self._ask_at + ORPHAN_GRACE_SECONDS)
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._obey(*os.fsdecode(line).split("\0"))

    def _obey(self, order: str, *fields: str) -> None:
        if order == Order.START:
            self._start(fields[0] == "1", fields[1:])
        elif order == Order.UNTIL and not self._asked:
            self._ask_at, self._kill_at = float(fields[0]), float(fields[1])
        elif order == Order.KILL:
            self._ask_at = self._kill_at = now()
        elif order == Order.SIGNAL and self._group is not None:
            self._group.signal(int(fields[0]))

    # The command's life

    def _start(self, terminal: bool, environment: Sequence[str]) -> None:
        failure, alarm = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become(alarm, terminal, environment)
        os.close(alarm)
        with contextlib.suppress(OSError):  # the child does the same: the first of the two counts
            os.setpgid(pid, pid)
        errno = os.read(failure, 32)  # empty once the command runs
        os.close(failure)
        if not self._repeats:
            self._let_go()
        if errno:
            os.waitpid(pid, 0)
            write_line(self._reports, Report.FAILED, errno.decode())
            self._forget()
            return
        self._group = ProcessGroup(pid)

    def _become(self, alarm: int, terminal: bool, environment: Sequence[str]) -> None:
        """In the child: becomes the command, or says why not."""
        try:
            os.setpgid(0, 0)
            # Reported by the command's own process, before exec: if the guardian is killed now,
            # ``holdfast`` still knows every process that is left.
            write_line(self._reports, Report.STARTED, str(os.getpid()))
            if terminal:  # allowed from the background because SIGTTOU is ignored here
                with contextlib.suppress(OSError):
                    os.tcsetpgrp(0, os.getpid())
            for signum in (*SHIELDED, *PYTHON_IGNORES):
                if signum not in self._ignored:
                    signal.signal(signum, signal.SIG_DFL)
            variables = dict(os.environ)
            for pair in environment:
                name, _, variables[name] = pair.partition("=")
            os.execve(self._path, self._command, variables)  # noqa: S606 - no shell is the point
        except OSError as error:
            os.write(alarm, str(error.errno or 0).encode())
        finally:
            os._exit(127)

    def _let_go(self) -> None:
        """Closes what the caller may be waiting for the end of: standard streams, other pipes."""
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        low = 3
        wake_fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        for fd in sorted((self._orders, self._reports, self._children, wake_fd)):
            os.closerange(low, fd)
            low = fd + 1
        os.closerange(low, max(low, os.sysconf("SC_OPEN_MAX")))

    def _enforce(self, group: ProcessGroup) -> None:
        moment = now()
        if not self._asked and moment >= self._ask_at:
            self._asked = True
            group.signal(signal.SIGTERM)
            group.signal(signal.SIGCONT)  # the stopped can't act on it
        if moment >= self._kill_at:
            group.signal(signal.SIGKILL)
            self._kill_at = moment + KILL_AGAIN_SECONDS

    def _look_after(self, group: ProcessGroup) -> None:
        if not group.reaped and not self._reap(group):
            return
        if self._witness is not None:
            if not select.select([self._witness], [], [], 0)[0]:
                return
            self._poll.unregister(self._witness)
            os.close(self._witness)
            self._witness = None
        member = group.member()
        if member is None:
            write_line(self._reports, Report.ENDED, str(int(self._asked)))
            self._forget()
        elif member != group.number:
            self._watch(member)

    def _forget(self) -> None:
        """Prepares for another run, whose certain time is sent before its start; or, without
        repeats, for the end."""
        self._done = not self._repeats
        self._group = None
        self._asked = False
        self._ask_at = self._kill_at = float("inf")

    def _watch(self, member: int) -> None:
        """Watches a process of the group that still runs; others are found later."""
        try:
            self._witness = os.pidfd_open(member)
        except (AttributeError, OSError):  # not on this system, or it has just ended
            return
        self._poll.register(self._witness, select.POLLIN)

    def _reap(self, group: ProcessGroup) -> bool:
        """Reports all that happened to the leader; returns whether it has ended."""
        while True:
            pid, status = os.waitpid(group.number, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                return False
            if os.WIFSTOPPED(status):
                self._stopped = True
                write_line(self._reports, Report.STOPPED, str(os.WSTOPSIG(status)))
            elif os.WIFCONTINUED(status):
                self._stopped = False
                self._wake_parent()
            else:
                group.reaped = True
                write_line(self._reports, Report.EXITED, str(status))
                if self._stopped:  # killed, or it ended before we saw that it was continued
                    self._stopped = False
                    self._wake_parent()
                return True

    def _wake_parent(self) -> None:
        """Continues ``holdfast``, which was stopped with the command."""
        if not self._orphaned and os.getppid() == self._parent:
            with contextlib.suppress(OSError):
                os.kill(self._parent, signal.SIGCONT)
