"""How ``once``, ``run --every`` and ``elect`` end before their time."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from cli.processes import Cli, alive, guardian_of, read_line, read_to_the_end, until

JOBS = {
    # what is asked for: (the verb, the name that is held meanwhile)
    "once": (["once", "job"], "once/job"),
    "every": (["run", "--every", "365d", "job"], "every/job"),
    "elect": (["elect", "job"], "job"),
}
LOOP = "echo up; while :; do sleep 0.05; done"
FAMILY = "sleep 1000 & echo $$; wait"
STUBBORN = "trap '' TERM INT HUP; (sleep 1000) & echo $$; while :; do wait; done"

every_job = pytest.mark.parametrize("job", JOBS)
every_end = pytest.mark.parametrize("name", ["TERM", "INT", "HUP"])


def start(cli: Cli, job: str, script: str, *options: str) -> subprocess.Popen[str]:
    return cli.start(*JOBS[job][0], *options, "--", "sh", "-c", script)


def is_free(cli: Cli, job: str) -> bool:
    return cli("show", JOBS[job][1]).returncode == 1


@every_job
@every_end
def test_signals_are_passed_on(cli: Cli, job: str, name: str) -> None:
    process = start(cli, job, f"trap 'echo got; exit 5' {name}; {LOOP}")
    assert read_line(process) == "up\n"
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert process.communicate()[0] == "got\n"
    assert process.returncode == 5
    assert is_free(cli, job)


@every_job
@every_end
def test_a_signal_that_ends_the_command_gives_128_and_its_number(
    cli: Cli, job: str, name: str
) -> None:
    process = start(cli, job, LOOP)
    read_line(process)
    number = getattr(signal, f"SIG{name}")
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 128 + number
    assert is_free(cli, job)


@pytest.mark.parametrize("job", ["once", "elect"])
@every_end
def test_an_interrupted_wait_leaves_nothing(cli: Cli, job: str, name: str) -> None:
    """``run --every`` never waits."""
    holder = cli.hold(JOBS[job][1])
    process = start(cli, job, "echo ran")
    until(lambda: cli.show(JOBS[job][1])["waiters"])
    number = getattr(signal, f"SIG{name}")
    process.send_signal(number)
    assert process.communicate() == ("", "")
    assert process.returncode == 128 + number
    assert cli.show(JOBS[job][1])["waiters"] == []
    cli.let_go(holder)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("job", "script"), [("once", FAMILY), ("every", STUBBORN), ("elect", FAMILY)], ids=JOBS
)
def test_a_killed_holdfast_takes_the_command_with_it(cli: Cli, job: str, script: str) -> None:
    """And who comes next begins anew, under a higher token."""
    process = start(cli, job, script, "--ttl", "6")
    read_line(process)
    [holder] = cli.show(JOBS[job][1])["holders"]
    guardian = guardian_of(process)
    process.kill()
    read_to_the_end(process)
    until(lambda: not alive(guardian))
    until(lambda: is_free(cli, job))
    after = start(cli, job, "echo $HOLDFAST_TOKEN")
    answer, errors = after.communicate()
    assert after.returncode == 0
    assert int(answer) > holder["token"]
    if job != "elect":
        assert errors.startswith("holdfast: 'job' on sqlite:///")
        assert f": run 1 (token {holder['token']}, " in errors
        assert errors.endswith(f"did not finish; run 2 with token {int(answer)} takes over\n")


@every_job
def test_a_killed_command_is_not_done(cli: Cli, job: str) -> None:
    process = start(cli, job, "echo $$; while :; do sleep 0.05; done")
    os.kill(int(read_line(process)), signal.SIGKILL)
    process.communicate()
    assert process.returncode == 128 + signal.SIGKILL
    again = cli(*JOBS[job][0], "--", "echo", "ran")
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == ("" if job == "every" else "ran\n")  # a run of every() counts


@pytest.mark.parametrize("job", ["once", "every"])
@every_end
def test_a_job_that_was_told_to_end_is_run_again(cli: Cli, job: str, name: str) -> None:
    """It has not failed, so that is not recorded: a deployment must not cost a night."""
    options = ["--record-failure"] if job == "once" else []
    process = start(cli, job, LOOP, *options)
    read_line(process)
    process.send_signal(getattr(signal, f"SIG{name}"))
    process.communicate()
    again = cli(*JOBS[job][0], "--", "echo", "ran")
    assert (again.returncode, again.stdout) == (0, "ran\n")
    assert again.stderr.endswith("takes over\n")


@pytest.mark.parametrize("job", ["once", "every"])
def test_a_job_that_lost_its_lock_is_run_again(cli: Cli, job: str) -> None:
    options = ["--record-failure"] if job == "once" else []
    process = start(cli, job, LOOP, "--ttl", "3", *options)
    read_line(process)
    cli("break", JOBS[job][1], "--reason", "test")
    _, errors = process.communicate()
    assert process.returncode == 76
    assert "is no longer held: " in errors
    assert errors.endswith("; the command was ended\n")
    assert errors.count("\n") == 1
    assert cli(*JOBS[job][0], "--", "echo", "ran").stdout == "ran\n"


@every_job
def test_without_its_guardian_the_command_is_killed(cli: Cli, job: str) -> None:
    process = start(cli, job, STUBBORN)
    read_line(process)
    os.kill(guardian_of(process), signal.SIGKILL)
    read_to_the_end(process)
    assert process.wait() == 70
    assert is_free(cli, job)


@pytest.mark.parametrize("name", ["KILL", "STOP"])
def test_a_leader_has_stopped_before_the_next_one_begins(cli: Cli, name: str) -> None:
    leader = start(cli, "elect", FAMILY, "--ttl", "6")
    command = int(read_line(leader))
    standby = start(cli, "elect", f"kill -0 {command} && echo two lead || echo one leads")
    until(lambda: cli.show("job")["waiters"])
    leader.send_signal(getattr(signal, f"SIG{name}"))
    answer, _ = standby.communicate()
    assert (answer, standby.returncode) == ("one leads\n", 0)


def test_a_leader_that_was_told_to_end_does_not_campaign_again(cli: Cli) -> None:
    """Its command was slow to obey, and lost the leadership meanwhile."""
    leader = start(cli, "elect", f"trap 'echo got' TERM; {LOOP}", "--ttl", "6")
    assert read_line(leader) == "up\n"
    leader.terminate()
    assert read_line(leader) == "got\n"
    cli("break", "job", "--reason", "test")
    answer, _ = leader.communicate()
    assert "up" not in answer
    assert leader.returncode == 128 + signal.SIGTERM


def test_a_leader_that_was_told_something_else_campaigns_again(cli: Cli) -> None:
    """HUP is often an order to read the settings anew."""
    leader = start(cli, "elect", f"trap 'echo got' HUP; {LOOP}", "--ttl", "6")
    assert read_line(leader) == "up\n"
    leader.send_signal(signal.SIGHUP)
    assert read_line(leader) == "got\n"
    cli("break", "job", "--reason", "test")
    assert read_line(leader) == "up\n"
    leader.terminate()
    leader.communicate()
    assert leader.returncode == 128 + signal.SIGTERM
