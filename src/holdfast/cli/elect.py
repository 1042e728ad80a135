"""``holdfast elect NAME -- command``: runs a command while this is the leader."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING

from holdfast.cli.output.text import say
from holdfast.cli.parsing.options import (
    Parser,
    bind_address,
    connect_to_hold,
    epoch_option,
    length,
    store_options,
)
from holdfast.cli.run import answer, environment, prepare, split_command
from holdfast.cli.run.child import TO_END, Ending, run_command
from holdfast.cli.run.command import Command
from holdfast.cli.run.signals import Interrupted
from holdfast.cli.run.waiting import Waiting

if TYPE_CHECKING:
    from holdfast.cli.health import HealthServer
    from holdfast.primitives.election import Election

__all__ = ["main"]

AGAIN_SECONDS = 2.0
"""How long to wait before another campaign where the store can't be reached."""


def main(argv: list[str]) -> int:
    own, command = split_command(argv)
    usage = "holdfast elect NAME [options] -- command …"
    parser = Parser(
        "elect",
        "Campaigns, runs the command as long as this is the leader, ends it before it no longer\n"
        "is, and campaigns again. Ends when the command ends by itself, with its exit code.",
        usage,
    )
    parser.runs_command = True
    parser.add_argument("name", metavar="NAME", help="what is led")
    parser.add_argument(
        "--ttl", metavar="TIME", type=length, help="how long it lasts without renewal (30s)"
    )
    parser.add_argument("--note", metavar="TEXT", help="what others see of the leader")
    parser.add_argument(
        "--health",
        metavar="HOST:PORT",
        type=bind_address,
        help="answer probes over HTTP: leader or standby",
    )
    epoch_option(parser)
    store_options(parser)
    options = parser.parse_args(own)
    child = prepare(command, "elect", repeats=True)
    try:
        with _health(options) as health, connect_to_hold(options) as locks:
            election = locks.election(options.name, note=options.note)
            shown = f"the leadership of {election.name!r}"
            waiting = Waiting(locks, election.name, shown=shown, holds="held", seconds=None)
            ending = None
            while ending is None:
                ending = _term(child, election, waiting, health)
    finally:
        child.close()
    return answer(ending, options.name)


def _health(options: SimpleNamespace) -> AbstractContextManager[HealthServer | None]:
    """The server for probes, if one was asked for: its modules take as long to load as ours."""
    if options.health is None:
        return nullcontext()
    from holdfast.cli.health import HealthServer

    return HealthServer(options.health, options.name)


def _term(
    child: Command, election: Election, waiting: Waiting, health: HealthServer | None
) -> Ending | None:
    """One campaign and what follows; ``None`` if another is due."""
    from holdfast.errors import BackendUnavailable, LockLost

    ending: Ending | None = None
    lost = f"the leadership of {election.name!r} was about to be lost"
    child.rest()
    try:
        with waiting, election.campaign() as lease:
            waiting.end()
            if health is not None:
                health.lease = lease
            ending = run_command(child, lease, environment(lease))
        if not ending.cut:
            return ending
    except LockLost as error:
        lost = str(error)
        if ending is not None and not ending.cut:  # it had ended by itself
            say(lost)
            return ending
    except BackendUnavailable as error:
        say(f"{error}; campaigning again")
        time.sleep(AGAIN_SECONDS)
        return None
    if ending is not None and ending.end_signal in TO_END:
        raise Interrupted(ending.end_signal)  # the signal ends this program, not only this term
    say(f"{lost}; campaigning again")
    return None
