"""``once``, ``run --every`` and ``elect``: the command as a job of the fleet."""

from __future__ import annotations

import signal
import subprocess

from cli.processes import Cli, read_line, until


def test_once_runs_once(cli: Cli) -> None:
    first = cli("once", "invoice:1", "--", "echo", "ran")
    assert (first.returncode, first.stdout, first.stderr) == (0, "ran\n", "")
    again = cli("once", "invoice:1", "--", "echo", "ran")
    assert (again.returncode, again.stdout) == (0, "")
    assert cli("once", "invoice:2", "--", "echo", "ran").stdout == "ran\n"


def test_a_failed_run_is_run_again(cli: Cli) -> None:
    assert cli("once", "k", "--", "sh", "-c", "exit 3").returncode == 3
    assert cli("once", "k", "--", "echo", "ran").stdout == "ran\n"


def test_a_recorded_failure_is_told(cli: Cli) -> None:
    assert cli("once", "k", "--record-failure", "--", "sh", "-c", "exit 3").returncode == 3
    again = cli("once", "k", "--", "echo", "ran")
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.startswith("holdfast: 'k' failed ")
    assert again.stderr.endswith(" ago: exit code 3\n")


def test_another_run_is_waited_for_or_skipped(cli: Cli) -> None:
    runner = cli.start("once", "k", "--", "sh", "-c", "echo up; read line")
    assert read_line(runner) == "up\n"
    skipped = cli("once", "k", "-n", "--", "echo", "ran")
    assert (skipped.returncode, skipped.stdout) == (75, "")
    assert f"pid {runner.pid}" in skipped.stderr
    waiter = cli.start("once", "k", "--", "echo", "ran")
    until(lambda: any(info["waiters"] for info in cli.listed()))
    runner.communicate("\n")
    assert waiter.communicate()[0] == ""
    assert (runner.returncode, waiter.returncode) == (0, 0)


def test_bad_input(cli: Cli) -> None:
    """Messages speak of the job, and are one line."""
    for arguments, code, says in (
        (("once", "k"), 64, "no command: holdfast once KEY -- command …"),
        (("elect", "k"), 64, "no command: holdfast elect NAME -- command …"),
        (("once", "", "--", "true"), 64, "a job's key can't be empty"),
        (("once", "a\nb", "--", "true"), 64, "a job's key can't contain control characters"),
        (("once", "k", "--keep", "soon", "--", "true"), 64, "'soon' is no duration"),
        (("once", "k", "--", "no-such-command"), 127, "no-such-command: command not found"),
        (("run", "--every", "1ms", "k", "--", "true"), 64, "interval is 0.01 s at least"),
        (
            ("once", "--url", "redlock://a,b,c", "k", "--", "true"),
            78,
            "it does not guarantee RECORDS",
        ),
    ):
        result = cli(*arguments)
        assert (result.returncode, result.stdout) == (code, "")
        assert says in result.stderr
        assert result.stderr.count("\n") == 1


def test_every_runs_once_per_interval(cli: Cli) -> None:
    first = cli("run", "--every", "365d", "report", "--", "sh", "-c", "echo ran; exit 4")
    assert (first.returncode, first.stdout) == (4, "ran\n")
    again = cli("run", "--every", "365d", "report", "--", "echo", "ran")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert cli("run", "--every", "1h", "-s", "report", "--", "true").returncode == 64


def test_elect_runs_while_leader_and_again(cli: Cli) -> None:
    script = "echo lead; trap 'echo stop; exit 0' TERM; while :; do sleep 0.05; done"
    leader = cli.start("elect", "boss", "--ttl", "6", "--", "sh", "-c", script)
    assert read_line(leader) == "lead\n"
    cli("break", "boss", "--reason", "test")
    assert read_until(leader, "lead\n") <= {"stop\n"}  # ended, and elected again
    standby = cli.start("elect", "boss", "--", "echo", "lead too")
    until(lambda: cli.show("boss")["waiters"])
    leader.send_signal(signal.SIGTERM)
    assert leader.communicate()[0].endswith("stop\n")
    assert leader.returncode == 0
    assert standby.communicate()[0] == "lead too\n"


def read_until(process: subprocess.Popen[str], wanted: str) -> set[str]:
    """The lines before the one that is wanted; none of them is the last."""
    lines: set[str] = set()
    while (line := read_line(process)) != wanted:
        assert line, "it has ended"
        lines.add(line)
    return lines


def test_a_candidate_that_is_told_to_end_leaves_nothing(cli: Cli) -> None:
    cli.hold("boss")
    candidate = cli.start("elect", "boss", "--", "true")
    until(lambda: cli.show("boss")["waiters"])
    candidate.send_signal(signal.SIGTERM)
    assert candidate.wait() == 128 + signal.SIGTERM
    assert cli.show("boss")["waiters"] == []
