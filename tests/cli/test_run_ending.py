"""How a run ends before its time: signals, killed processes, locks that are lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.processes import Cli, alive, guardian_of, read_line, read_to_the_end, until

# Says that it is there, together with a process in its background, and stays.
FAMILY = "sleep 1000 & echo up; wait"
STUBBORN = "trap '' TERM INT HUP; (sleep 1000) & echo up; while :; do wait; done"


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"])
def test_signals_are_passed_on(cli: Cli, name: str) -> None:
    script = f"trap 'echo got; exit 5' {name}; echo up; while :; do sleep 0.05; done"
    process = cli.start("run", "x", "--", "sh", "-c", script)
    assert read_line(process) == "up\n"
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert read_line(process) == "got\n"
    assert process.wait() == 5
    assert cli("show", "x").returncode == 1


def test_a_signal_that_ends_the_command_gives_128_and_its_number(cli: Cli) -> None:
    process = cli.start("run", "x", "--", "sh", "-c", FAMILY)
    read_line(process)
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize("script", [FAMILY, STUBBORN])
def test_a_killed_holdfast_takes_the_whole_group_with_it(cli: Cli, script: str) -> None:
    process = cli.start("run", "x", "--", "sh", "-c", script)
    read_line(process)
    guardian = guardian_of(process)
    process.kill()
    read_to_the_end(process)
    until(lambda: not alive(guardian))


def test_a_killed_job_takes_the_group_with_it(cli: Cli) -> None:
    process = cli.start("run", "x", "--", "sh", "-c", FAMILY, process_group=0)
    read_line(process)
    guardian = guardian_of(process)
    os.killpg(process.pid, signal.SIGKILL)
    read_to_the_end(process)
    until(lambda: not alive(guardian))


def test_a_killed_waiter_leaves_no_guardian(cli: Cli) -> None:
    cli.hold("x")
    process = cli.start("run", "x", "--", "true")
    until(lambda: cli.show("x")["waiters"])
    guardian = guardian_of(process)
    process.kill()
    until(lambda: not alive(guardian))


def test_signals_meant_for_others_do_not_end_the_guardian(cli: Cli) -> None:
    process = cli.start("run", "x", "--", "sh", "-c", "echo up; read line; exit 4")
    read_line(process)
    for name in ("TERM", "INT", "HUP", "QUIT", "TSTP", "USR1"):
        os.kill(guardian_of(process), getattr(signal, f"SIG{name}"))
    process.communicate("\n")
    assert process.returncode == 4


def test_without_its_guardian_the_command_is_killed_and_the_lock_released(cli: Cli) -> None:
    process = cli.start("run", "x", "--", "sh", "-c", STUBBORN)
    read_line(process)
    os.kill(guardian_of(process), signal.SIGKILL)
    _, answer = process.communicate()
    assert process.returncode == 70
    assert answer == "holdfast: the command's guardian was killed, and so was the command\n"
    assert cli("show", "x").returncode == 1


def test_a_guardian_that_is_killed_at_once_leaves_nobody_behind(cli: Cli) -> None:
    """By the very first thing that the command does."""
    process = cli.start("run", "x", "--", "sh", "-c", "kill -KILL $PPID; sleep 1000")
    read_to_the_end(process)
    assert process.wait() == 70
    assert cli("show", "x").returncode == 1


def test_a_stopped_holdfast_cannot_outlive_its_lock(cli: Cli) -> None:
    process = cli.start("run", "x", "--ttl", "3", "--", "sh", "-c", STUBBORN)
    read_line(process)
    process.send_signal(signal.SIGSTOP)
    read_to_the_end(process)  # ended by the guardian, while holdfast is stopped
    assert Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T"
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 76


def test_a_broken_lock_ends_the_command(cli: Cli) -> None:
    process = cli.start("run", "x", "--ttl", "3", "--", "sh", "-c", STUBBORN)
    read_line(process)
    token = cli.show("x")["holders"][0]["token"]
    assert str(token) in cli("break", "x", "--reason", "test").stdout
    _, errors = process.communicate()
    assert process.returncode == 76
    assert errors.startswith("holdfast: 'x' on sqlite://")
    assert "is no longer held: " in errors
    assert errors.endswith("; the command was ended\n")
    assert errors.count("\n") == 1
    assert cli("run", "x", "-n", "--", "true").returncode == 0


def test_doubt_gives_the_command_time_to_end_well(cli: Cli) -> None:
    script = "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    process = cli.start("run", "x", "--ttl", "6", "--", "sh", "-c", script)
    read_line(process)
    # Renewals fail from now on.
    store = cli.folder / "locks.db"
    with_lock = "import sqlite3,sys,time; c=sqlite3.connect(sys.argv[1], isolation_level=None)"
    blocker = subprocess.Popen(
        [sys.executable, "-c", f"{with_lock}; c.execute('begin exclusive'); input()", str(store)],
        stdin=subprocess.PIPE,
    )
    assert read_line(process) == "saved\n"
    blocker.communicate(b"\n")
    _, errors = process.communicate()
    assert process.returncode == 76
    last = errors.splitlines()[-1]
    assert (
        last == "holdfast: 'x' was not renewed in time, and about to be lost; the command was ended"
    )


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP"])
def test_an_interrupted_wait_leaves_nothing(cli: Cli, name: str) -> None:
    holder = cli.hold("x")
    process = cli.start("run", "x", "--", "true")
    until(lambda: cli.show("x")["waiters"])
    number = getattr(signal, f"SIG{name}")
    process.send_signal(number)
    assert process.communicate() == ("", "")
    assert process.returncode == 128 + number
    assert cli.show("x")["waiters"] == []
    cli.let_go(holder)


def test_a_command_that_was_stopped_by_hand_keeps_its_lock_where_there_is_no_terminal(
    cli: Cli,
) -> None:
    script = "echo $$; read line; echo went on"
    process = cli.start("run", "x", "--ttl", "3", "--", "sh", "-c", script, start_new_session=True)
    command = int(read_line(process))
    os.kill(command, signal.SIGSTOP)
    seen: list[float] = []

    def renewed() -> bool:
        seen.append(cli.show("x")["holders"][0]["remaining"])
        return seen[-1] > min(seen)

    until(renewed)
    os.kill(command, signal.SIGCONT)
    out, _ = process.communicate("\n")
    assert (out, process.returncode) == ("went on\n", 0)
