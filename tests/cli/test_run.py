"""``holdfast run``: what the command gets, what the caller gets back, who else is let in."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

import holdfast
from cli.processes import Cli, until


def test_the_command_gets_its_lock_in_the_environment(cli: Cli) -> None:
    names = "$HOLDFAST_NAME/$HOLDFAST_TOKEN/$HOLDFAST_FENCE"
    first = cli("run", "a = 'b'", "--", "sh", "-c", f'echo "{names}"')
    assert (first.returncode, first.stderr) == (0, "")
    name, token, fence = first.stdout.strip().split("/")
    assert holdfast.Fence.parse(fence) == holdfast.Fence(
        "a = 'b'", holdfast.Mode.EXCLUSIVE, (), 0, int(token)
    )
    second = cli("run", name, "--", "sh", "-c", "echo $HOLDFAST_TOKEN")
    assert int(second.stdout) > int(token)


def test_arguments_reach_the_command_as_they_are(cli: Cli) -> None:
    arguments = ["$HOME", "a b", "--", "*", "-n", "", "ü"]
    result = cli("run", "x", "--", "printf", r"%s\n", *arguments)
    assert result.stdout.split("\n")[:-1] == arguments


def test_the_exit_code_comes_back(cli: Cli) -> None:
    assert cli("run", "x", "--", "sh", "-c", "exit 3").returncode == 3
    assert cli("run", "x", "--", "sh", "-c", "kill -USR1 $$").returncode == 128 + signal.SIGUSR1
    assert cli("run", "x", "--", "sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL


def test_standard_input_is_the_commands(cli: Cli) -> None:
    read, write = os.pipe()
    os.write(write, b"hello\n")
    os.close(write)
    assert cli("run", "x", "--", "cat", stdin=read).stdout == "hello\n"
    os.close(read)


def test_the_lock_is_released_afterwards(cli: Cli) -> None:
    cli("run", "x", "--", "true")
    assert cli("show", "x").returncode == 1


def test_a_conflict_names_the_holder(cli: Cli) -> None:
    holder = cli.hold("nightly", "--note", "the big one")
    result = cli("run", "nightly", "-n", "--", "echo", "never")
    assert (result.returncode, result.stdout) == (75, "")
    assert result.stderr.startswith("holdfast: 'nightly' is held by ")
    assert f"pid {holder.pid}" in result.stderr
    assert "the big one" in result.stderr
    assert result.stderr.count("\n") == 1
    assert cli("run", "nightly", "-w", "0.1", "--", "true").returncode == 75
    assert cli("run", "nightly", "-w", "0.1", "-E", "0", "--", "false").returncode == 0
    assert cli("run", "other", "-n", "--", "true").returncode == 0
    cli.let_go(holder)
    assert holder.returncode == 0
    assert cli("run", "nightly", "-n", "--", "true").returncode == 0


def test_a_waiter_runs_when_the_holder_is_done(cli: Cli) -> None:
    holder = cli.hold("x")
    waiter = cli.start("run", "x", "--", "echo", "mine")
    until(lambda: cli.show("x")["waiters"])
    cli.let_go(holder)
    assert waiter.communicate() == ("mine\n", "")


def test_shared_holders_keep_others_out(cli: Cli) -> None:
    one, two = cli.hold("x", "-s"), cli.hold("x", "-s", "-n")
    assert [holder["mode"] for holder in cli.show("x")["holders"]] == ["shared", "shared"]
    assert cli("run", "x", "-n", "--", "true").returncode == 75
    cli.let_go(one)
    cli.let_go(two)
    assert cli("run", "x", "-n", "--", "true").returncode == 0


def test_slots_let_so_many_in(cli: Cli) -> None:
    holders = [cli.hold("x", "--slots", "2", "-n") for _ in range(2)]
    assert cli("run", "x", "--slots", "2", "-n", "--", "true").returncode == 75
    mismatch = cli("run", "x", "--slots", "3", "-n", "--", "true")
    assert mismatch.returncode == 78
    assert "limit" in mismatch.stderr
    cli.let_go(holders[0])
    assert cli("run", "x", "--slots", "2", "-n", "--", "true").returncode == 0


def test_a_command_that_cannot_run_never_takes_the_lock(cli: Cli) -> None:
    cli.hold("x")
    missing = cli("run", "x", "--", "no-such-command")
    assert (missing.returncode, missing.stderr) == (
        127,
        "holdfast: no-such-command: command not found\n",
    )
    script = cli.folder / "script"
    script.write_text("#!/bin/sh\n")
    assert cli("run", "x", "--", str(script)).returncode == 126
    assert cli("run", "x", "--", str(cli.folder)).returncode == 126


def test_a_command_that_looked_right_but_fails_to_start(cli: Cli) -> None:
    script = cli.folder / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    result = cli("run", "x", "--", str(script))
    assert result.returncode == 127
    assert "interpreter" in result.stderr
    script.write_text("no interpreter line: a shell would guess, we don't\n")
    assert cli("run", "x", "--", str(script)).returncode == 126
    assert cli("show", "x").returncode == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["x"],
        ["x", "--"],
        ["--", "true"],
        ["x", "-n", "-w", "1", "--", "true"],
        ["x", "-s", "--slots", "2", "--", "true"],
        ["x", "--slots", "0", "--", "true"],
        ["x", "--ttl", "0", "--", "true"],
        ["x", "--ttl", "nan", "--", "true"],
        ["x", "--ttl", "-1", "--", "true"],
        ["x", "-w", "soon", "--", "true"],
        ["x", "-E", "256", "--", "true"],
        ["x", "--frobnicate", "--", "true"],
        ["", "--", "true"],
        ["x" * 513, "--", "true"],
        ["a\tb", "--", "true"],
    ],
)
def test_wrong_usage_is_one_line_and_64(cli: Cli, arguments: list[str]) -> None:
    result = cli("run", *arguments)
    assert (result.returncode, result.stdout) == (64, "")
    assert result.stderr.startswith("holdfast: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("url", ["carrier-pigeon://coop", "nonsense", "sqlite:///x?colour=red"])
def test_a_wrong_store_is_one_line_and_78(cli: Cli, url: str) -> None:
    result = cli("run", "x", "--url", url, "--", "true")
    assert result.returncode == 78
    assert result.stderr.startswith("holdfast: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("patience", [[], ["-n"]])
def test_a_refused_place_is_told_once(cli: Cli, tmp_path: Path, patience: list[str]) -> None:
    tmp_path.chmod(0o777)
    url = f"sqlite://{tmp_path}/locks.db"
    result = cli("run", "x", *patience, "--url", url, "--", "true")
    assert result.returncode == 78
    assert "can be written by everybody" in result.stderr
    assert result.stderr.count("\n") == 1  # nothing was taken, so nothing is to be released


def test_without_a_url_it_uses_the_local_store_and_tells_only_a_terminal(cli: Cli) -> None:
    result = cli("run", "x", "--", "echo", "held", env={"HOLDFAST_URL": ""})
    assert (result.returncode, result.stdout, result.stderr) == (0, "held\n", "")


def test_a_pipeline_ends_when_the_command_closes_its_output(cli: Cli, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    process = cli.start("run", "x", "--", "sh", "-c", f"echo out; exec >&-; read x < {gate}")
    assert process.stdout is not None
    assert process.stdout.read() == "out\n"  # ends although the command goes on
    assert cli("show", "x").returncode == 0
    gate.write_text("\n")
    assert process.wait() == 0


def test_closed_streams_stay_closed_for_the_command(cli: Cli) -> None:
    line = 'exec <&- >&-; "$@"; exit $?'
    found = cli.folder / "found"
    script = f"[ -e /proc/$$/fd/0 ] || echo closed > {found}"
    command = [*cli.command, "run", "x", "--", "sh", "-c", script]
    subprocess.run(["sh", "-c", line, "sh", *command], env=cli.environment, check=True)
    assert found.read_text() == "closed\n"


def test_signals_have_their_usual_effect_in_the_command(cli: Cli) -> None:
    look = ["grep", "SigIgn", "/proc/self/status"]

    def ignored(prefix: str, command: list[str]) -> int:
        script = f'{prefix} exec "$@"'
        result = subprocess.run(
            ["sh", "-c", script, "sh", *command],
            env=cli.environment,
            text=True,
            capture_output=True,
        )
        return int(result.stdout.split()[1], 16)

    under = [*cli.command, "run", "x", "--", *look]
    usual = ignored("", look)  # what whoever started the tests ignores stays ignored
    assert ignored("", under) == usual  # although Python itself ignores SIGPIPE
    assert ignored("trap '' HUP;", under) == usual | 1 << (signal.SIGHUP - 1)  # as nohup does


def test_background_processes_of_the_command_keep_the_lock(cli: Cli, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"(read x < {gate}) & echo $$"
    process = cli.start("run", "x", "--", "sh", "-c", script)
    assert process.stdout is not None
    leader = int(process.stdout.readline())
    until(lambda: not Path(f"/proc/{leader}").exists())
    assert cli("show", "x").returncode == 0
    gate.write_text("\n")
    assert process.wait() == 0
    assert cli("show", "x").returncode == 1
