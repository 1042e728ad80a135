"""On a terminal: the command has it, job control works through ``holdfast``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cli.processes import Cli, until
from cli.screen import Shell

ECHO = f"{sys.executable} {Path(__file__).with_name('echo.py')}"


def start(shell: Shell, command: str, before: str = "", after: str = "", options: str = "") -> None:
    shell.run(f"{before}{shell.holdfast} run x {options} -- {command}{after}")


def test_the_command_reads_the_terminal(shell: Shell) -> None:
    start(shell, "sh -c 'echo name?; read name; echo hello $name; exit 7'")
    shell.expect(r"name\?\r\n")
    shell.type("you\n")
    shell.expect(r"hello you\r\n")
    shell.prompt()
    shell.run("echo code $?")
    shell.expect(r"code 7\r\n")


def test_an_interactive_program_has_job_control_of_its_own(shell: Shell) -> None:
    start(shell, "env 'PS1=inner> ' sh -i")
    shell.expect("inner> ")
    shell.type("sh -c 'echo up; exec sleep 1000'\n")
    shell.expect(r"\r\nup\r\n")
    shell.type("\x03")
    shell.expect("inner> ")
    shell.type("exit 5\n")
    shell.prompt()
    shell.run("echo code $?")
    shell.expect(r"code 5\r\n")


def test_it_says_that_it_uses_the_local_store(shell: Shell) -> None:
    start(shell, "echo held", before="HOLDFAST_URL= ")
    shell.expect(r"holdfast: using the local store[^\r]*\r\n")
    shell.expect(r"held\r\n")


def test_ctrl_z_stops_the_job_and_fg_goes_on(shell: Shell) -> None:
    start(shell, ECHO)
    stop_and_go_on(shell)
    shell.type("\x04")
    shell.prompt()
    shell.run("echo code $?")
    shell.expect(r"code 0\r\n")


def test_ctrl_z_stops_a_script_around_it_too(shell: Shell) -> None:
    shell.run(f"bash -c '{shell.holdfast} run x -- {ECHO}; echo script goes on'")
    stop_and_go_on(shell)
    shell.type("\x04")
    shell.expect(r"script goes on\r\n")


def stop_and_go_on(shell: Shell) -> None:
    shell.expect(r"up\r\n")
    shell.type("one\n")
    shell.expect(r"got one\r\n")
    shell.type("\x1a")
    shell.expect(r"Stopped")
    shell.prompt()
    shell.run("fg")
    shell.expect(r"back\r\n")
    shell.type("two\n")
    shell.expect(r"got two\r\n")


def test_ctrl_c_ends_the_command_and_the_loop_around_it(shell: Shell) -> None:
    shell.run(
        f"bash -c 'while :; do {shell.holdfast} run x -- sh -c \"echo up; exec sleep 1000\"; done'"
    )
    shell.expect(r"up\r\n")
    shell.type("\x03")
    shell.prompt()
    shell.run("echo code $?")
    shell.expect(r"code 130\r\n")


def test_ctrl_c_reaches_a_command_in_a_pipeline(shell: Shell) -> None:
    start(shell, "sh -c 'echo up; exec sleep 1000'", after=" | cat")
    shell.expect(r"up\r\n")
    shell.type("\x03")
    shell.prompt()


def test_a_pager_behind_it_keeps_the_terminal(shell: Shell) -> None:
    pager = "sh -c 'read line; echo shown: $line; read key < /dev/tty; echo key: $key'"
    start(shell, "echo text", after=f" | {pager}")
    shell.expect(r"shown: text\r\n")
    shell.type("q\n")
    shell.expect(r"key: q\r\n")


def test_a_command_in_a_pipeline_gets_the_terminal_when_it_asks_for_it(shell: Shell) -> None:
    start(shell, "sh -c 'read l; echo piped $l; read key < /dev/tty; echo key: $key'", "echo in | ")
    shell.expect(r"piped in\r\n")
    shell.type("q\n")
    shell.expect(r"key: q\r\n")
    shell.prompt()
    start(shell, "sh -c 'echo ask >&2; read key; echo key: $key >&2'", after=" > /dev/null")
    shell.expect(r"ask\r\n")
    shell.type("w\n")
    shell.expect(r"key: w\r\n")


def test_a_background_job_that_reads_stops_until_it_is_in_the_foreground(shell: Shell) -> None:
    shell.run("set -b")  # tell of stopped jobs at once
    shell.prompt()
    start(shell, ECHO, after=" &")
    shell.expect(r"up\r\n")
    shell.expect(r"Stopped")
    shell.run("fg")
    shell.expect(r"back\r\n")
    shell.type("now\n")
    shell.expect(r"got now\r\n")
    shell.type("\x04")
    shell.prompt()


def test_a_stopped_job_ends_with_its_lock(shell: Shell) -> None:
    start(shell, ECHO, options="--ttl 2")
    shell.expect(r"up\r\n")
    shell.type("\x1a")
    shell.expect(r"Stopped")
    shell.expect(r"holdfast: [^\r]*\r\n")  # the guardian ended it meanwhile
    shell.run("wait %1; echo code $?")
    shell.expect(r"code 76\r\n")


def test_a_stopped_command_that_is_killed_ends_its_job(shell: Shell) -> None:
    """It is never continued, so its end alone has to continue ``holdfast``."""
    start(shell, "sh -c 'echo command $$; exec sleep 1000'")
    shell.expect(r"command ")
    pid = shell.expect(r"[0-9]+\r\n").strip()
    shell.type("\x1a")
    shell.expect(r"Stopped")
    shell.run(f"kill -9 {pid}; while jobs -s | grep -q holdfast; do sleep 0.1; done")
    shell.expect(r"Exit 137")


def test_a_killed_command_leaves_a_terminal_that_works(shell: Shell) -> None:
    start(shell, "sh -c 'stty raw -echo; kill -9 $$'")
    shell.prompt()
    shell.run("stty -a | grep -o ' -*icanon'")
    shell.expect(r"\r?\n? icanon\r\n")


@pytest.mark.parametrize("job", ["once night --record-failure", "run --every 365d night"])
def test_ctrl_c_ends_a_job_which_is_then_still_to_be_done(shell: Shell, job: str) -> None:
    shell.run(f"{shell.holdfast} {job} -- sh -c 'echo up; exec sleep 1000'")
    shell.expect(r"up\r\n")
    shell.type("\x03")
    shell.prompt()
    shell.run(f"{shell.holdfast} {job} -- echo ran")
    shell.expect(r"run 1 .*did not finish; run 2 with token [0-9]+ takes over\r\n")
    shell.expect(r"ran\r\n")
    shell.prompt()
    shell.run(f"{shell.holdfast} {job} -- echo again")
    shell.expect("'night' (was done|is not due for) ")
    shell.prompt()


def test_ctrl_c_ends_a_leader_and_a_candidate(cli: Cli, shell: Shell) -> None:
    shell.run(f"{shell.holdfast} elect boss -- sh -c 'echo up; exec sleep 1000'")
    shell.expect(r"up\r\n")
    shell.type("\x03")
    shell.prompt()
    holder = cli.hold("boss")
    shell.run(f"{shell.holdfast} elect boss -- echo led")
    until(lambda: cli.show("boss")["waiters"])
    shell.type("\x03")
    shell.prompt()
    shell.run("echo code $?")
    shell.expect(r"code 130\r\n")
    assert cli.show("boss")["waiters"] == []
    cli.let_go(holder)
