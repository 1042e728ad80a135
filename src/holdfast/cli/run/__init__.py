"""``holdfast run NAME … -- command``: runs a command under a lock, as ``flock(1)`` does."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING

from holdfast.cli.exits import DEFECT, LOST, NOT_ACQUIRED, USAGE, Refused
from holdfast.cli.output.text import since
from holdfast.cli.parsing.options import (
    PATIENCE_SECONDS,
    Parser,
    connect_to_hold,
    epoch_option,
    exit_code,
    length,
    seconds,
    store_options,
    whole,
)
from holdfast.cli.run.child import Ending, run_command
from holdfast.cli.run.command import Command
from holdfast.cli.run.waiting import Waiting

if TYPE_CHECKING:
    from holdfast import Lease, Locks, LockTimeout

__all__ = [
    "answer",
    "command_line",
    "conflict_option",
    "environment",
    "main",
    "prepare",
    "split_command",
]

EPILOG = """\
The command runs without a shell, in a process group of its own, with HOLDFAST_NAME,
HOLDFAST_TOKEN and HOLDFAST_FENCE in its environment. The lock is released when the whole
group is gone. When the lock is about to be lost the group gets TERM, then KILL.

exit codes: the command's own; 128 + n if signal n ended it; 75 (or -E) not acquired;
76 lock lost; 64 wrong usage; 69 store unreachable; 78 wrong store or setting;
126 not executable; 127 not found."""


def main(argv: list[str]) -> int:
    own, command = split_command(argv)
    options = command_line().parse_args(own)
    if options.every and (options.shared or options.slots or options.wait is not None):
        raise Refused("--every goes without -s, --slots and -w", USAGE)
    child = prepare(command, "run")
    child.rest()
    try:
        if options.every:
            return _run_every(child, options)
        return answer(_run(child, options), options.name)
    finally:
        child.close()


def prepare(command: list[str], verb: str, *, repeats: bool = False) -> Command:
    """A command that is ready to be run; forks, so before there are threads and connections."""
    if not command:
        what = "KEY" if verb == "once" else "NAME"
        raise Refused(f"no command: holdfast {verb} {what} -- command …", USAGE)
    return Command(command, repeats=repeats)


def split_command(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is ours and what is the command's: the first ``--`` parts them."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def command_line() -> Parser:
    """What ``run`` takes before the ``--``."""
    usage = "holdfast run NAME [options] -- command …"
    parser = Parser("run", "Runs a command while holding a lock.", usage)
    parser.epilog, parser.runs_command = EPILOG, True
    parser.add_argument("name", metavar="NAME", help="what is locked")
    parser.add_argument("-n", "--nonblock", group="wait", action="store_true", help="do not wait")
    parser.add_argument(
        *("-w", "--wait"),
        group="wait",
        metavar="TIME",
        type=seconds,
        help="wait this long at most",
    )
    parser.add_argument(
        "-s",
        "--shared",
        group="mode",
        action="store_true",
        help="shared: together with others that have -s",
    )
    parser.add_argument("--slots", group="mode", metavar="N", type=whole, help="let N run at once")
    parser.add_argument(
        "--ttl", metavar="TIME", type=length, help="how long it lasts without renewal (30s)"
    )
    parser.add_argument("--note", metavar="TEXT", help="shown to others who look or wait")
    parser.add_argument(
        "--every", metavar="TIME", type=length, help="run once per interval across the fleet"
    )
    conflict_option(parser)
    epoch_option(parser)
    store_options(parser)
    return parser


def conflict_option(parser: Parser) -> None:
    """``-E``, as ``flock`` has it."""
    parser.add_argument(
        *("-E", "--conflict-exit-code"),
        metavar="CODE",
        type=exit_code,
        default=NOT_ACQUIRED,
        help="exit code when it is not acquired (75)",
    )


def _run(child: Command, options: SimpleNamespace) -> Ending:
    from holdfast.errors import LockLost, LockTimeout

    ending: Ending | None = None
    try:
        with (
            connect_to_hold(options) as locks,
            _waiting(locks, options) as waiting,
            _lock(locks, options) as lease,
        ):
            waiting.end()
            ending = run_command(child, lease, environment(lease))
    except LockTimeout as error:
        raise Refused(_conflict(error), options.conflict_exit_code) from error
    except LockLost as error:
        if ending is None:
            raise
        raise Refused(f"{error}; {_fate(ending)}", LOST) from error
    return ending


def _run_every(child: Command, options: SimpleNamespace) -> int:
    from holdfast.cli.jobs import run_job

    with connect_to_hold(options) as locks:
        job = locks.every(options.every, options.name, note=options.note)
        return run_job(child, locks, job, options.conflict_exit_code)


def _waiting(locks: Locks, options: SimpleNamespace) -> Waiting:
    seconds = PATIENCE_SECONDS if options.wait is None else options.wait
    seconds = None if options.nonblock else seconds
    shown = repr(options.name)
    return Waiting(locks, options.name, shown=shown, holds="held", seconds=seconds)


def _lock(locks: Locks, options: SimpleNamespace) -> AbstractContextManager[Lease]:
    timeout = 0 if options.nonblock else options.wait
    if options.slots:
        return locks.semaphore(options.name, options.slots, timeout=timeout, note=options.note)
    if options.shared:
        return locks.rwlock(options.name, timeout=timeout, note=options.note).read()
    return locks.lock(options.name, timeout=timeout, note=options.note)


def environment(lease: Lease) -> dict[str, str]:
    """The environment variables that describe the lock to the command."""
    return {
        "HOLDFAST_NAME": lease.name,
        "HOLDFAST_TOKEN": str(lease.token),
        "HOLDFAST_FENCE": str(lease.fence),
    }


def _conflict(error: LockTimeout) -> str:
    holder = error.holder
    if holder is None:
        return str(error)
    return f"{error.name!r} is held by {holder}, since {since(holder.since)}"


def _fate(ending: Ending) -> str:
    return "the command was ended" if ending.cut else "the command had not ended before"


def answer(ending: Ending, name: str, lost: str = "") -> int:
    """The exit code for how a command under the lock of this name ended. ``lost`` is the message of
    the lock's loss, if there was one."""
    if not ending.guarded:
        raise Refused("the command's guardian was killed, and so was the command", DEFECT)
    if ending.cut:
        lost = lost or f"{name!r} was not renewed in time, and about to be lost"
        raise Refused(f"{lost}; the command was ended", LOST)
    if ending.interrupted:
        # A shell script stops at Ctrl-C only if it saw it and what it ran died of it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(0 if ending.lent else os.getpid(), signal.SIGINT)
    return ending.code
