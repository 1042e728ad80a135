"""A command as a job whose outcome is recorded: for ``once`` and ``run --every``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from holdfast.cli.exits import NOT_ACQUIRED, NOTHING, Refused
from holdfast.cli.output.text import duration, is_terminal, say, since
from holdfast.cli.parsing.options import PATIENCE_SECONDS
from holdfast.cli.run import answer, environment
from holdfast.cli.run.child import Ending, run_command
from holdfast.cli.run.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast import Lease, Locks
    from holdfast.cli.run.command import Command
    from holdfast.primitives.once_outcome import Outcome

__all__ = ["CommandFailed", "run_job"]


class Job(Protocol):
    """What ``locks.once`` and ``locks.every`` give."""

    @property
    def key(self) -> str: ...
    @property
    def name(self) -> str: ...
    def run(self, function: Callable[..., int], /) -> Outcome: ...


class CommandStopped(BaseException):
    """The command was made to end: it is neither done nor failed, and the next caller runs it."""

    def __init__(self, ending: Ending, lost: str = "") -> None:
        """``lost`` is the message of the lock's loss, if that is why."""
        super().__init__()
        self.ending, self.lost = ending, lost


class CommandFailed(Exception):
    """The command did not end with 0; others read this text in the record."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(f"exit code {ending.code}")
        self.ending = ending


def run_job(child: Command, locks: Locks, job: Job, conflict_code: int = NOT_ACQUIRED) -> int:
    """Runs the command unless another process has run it. Returns its exit code, or 0 if it
    was done already."""

    shown = repr(job.key)
    waiting = Waiting(locks, job.name, shown=shown, holds="run", seconds=PATIENCE_SECONDS)

    def work(lease: Lease) -> int:
        waiting.end()
        ending = run_command(child, lease, environment(lease))
        stopped = ending.interrupted or (ending.end_signal and ending.code)
        if stopped or ending.cut or not ending.guarded:
            raise CommandStopped(ending, _lost(lease) if ending.cut else "")
        if ending.code:
            raise CommandFailed(ending)
        return 0

    try:
        with waiting:
            outcome = job.run(work)
    except CommandFailed as end:
        return answer(end.ending, job.key)
    except CommandStopped as end:
        return answer(end.ending, job.key, end.lost)
    return 0 if outcome.ran else _not_run(outcome, conflict_code)


def _lost(lease: Lease) -> str:
    from holdfast.errors import LockLost

    try:
        lease.check()
    except LockLost as error:
        return str(error)
    return ""  # it is about to be lost


def _not_run(outcome: Outcome, conflict_code: int) -> int:
    key = repr(outcome.key)
    if outcome.status == "failed":
        when, why = duration(outcome.age_seconds), outcome.error
        why = why.removeprefix(f"{CommandFailed.__name__}: ")
        raise Refused(f"{key} failed {when} ago: {why}", NOTHING)
    if outcome.holder is not None:
        who, when = str(outcome.holder), since(outcome.holder.since)
        raise Refused(f"{key} is being run by {who}, since {when}", conflict_code)
    if is_terminal(2):
        due = outcome.next_seconds
        say(
            f"{key} was done {duration(outcome.age_seconds)} ago"
            if due is None
            else f"{key} is not due for {duration(due)}"
        )
    return 0
