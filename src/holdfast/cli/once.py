"""``holdfast once KEY -- command``: runs a command once per key, across the fleet."""

from __future__ import annotations

from holdfast.cli.jobs import run_job
from holdfast.cli.parsing.options import (
    Parser,
    connect_to_hold,
    epoch_option,
    length,
    store_options,
)
from holdfast.cli.run import conflict_option, prepare, split_command

__all__ = ["main"]


def main(argv: list[str]) -> int:
    own, command = split_command(argv)
    parser = Parser(
        "once",
        "Runs a command unless it has been run for this key. If it is running, waits for its\n"
        "end. A crashed run is taken over; a failed run is repeated by the next caller.",
        "holdfast once KEY [options] -- command …",
    )
    parser.runs_command = True
    parser.add_argument("key", metavar="KEY", help="what is done once")
    parser.add_argument("-n", "--nonblock", action="store_true", help="do not wait for another run")
    parser.add_argument(
        "--keep", metavar="TIME", type=length, default=7 * 86400.0, help="remember it so long (7d)"
    )
    parser.add_argument(
        "--record-failure", action="store_true", help="a failed run counts, and is not run again"
    )
    parser.add_argument(
        "--ttl", metavar="TIME", type=length, help="how long it lasts without renewal (30s)"
    )
    parser.add_argument("--note", metavar="TEXT", help="shown to others who look or wait")
    conflict_option(parser)
    epoch_option(parser)
    store_options(parser)
    options = parser.parse_args(own)
    child = prepare(command, "once")
    child.rest()
    try:
        with connect_to_hold(options) as locks:
            job = locks.once(
                options.key,
                keep=options.keep,
                errors="record" if options.record_failure else "retry",
                wait=not options.nonblock,
                note=options.note,
            )
            return run_job(child, locks, job, options.conflict_exit_code)
    finally:
        child.close()
