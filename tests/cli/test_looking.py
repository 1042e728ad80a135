"""``ls``, ``show``, ``break``, ``check``: what people and programs are told."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from cli.processes import Cli, until
from cli.screen import Shell
from holdfast import Holder, LockInfo, Mode, Waiter
from holdfast.cli.ls import _rows as rows_of
from holdfast.cli.output.lock_info import as_plain_data
from holdfast.cli.output.text import duration, since

HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202egnp\u2066\r\n\x9b1A"


def test_ls_lists_holders_and_waiters(cli: Cli) -> None:
    holder = cli.hold("jobs/a", "--note", "nightly")
    cli.hold("jobs/b", "-s")
    cli.hold("other")
    cli.start("run", "jobs/a", "--", "true")
    until(lambda: cli.show("jobs/a")["waiters"])
    result = cli("ls", "jobs/")
    assert result.returncode == 0
    head, first, second = result.stdout.splitlines()
    assert head.split() == [
        "NAME",
        "HELD",
        "BY",
        "MODE",
        "TOKEN",
        "SINCE",
        "LEFT",
        "WAITING",
        "NOTE",
    ]
    assert first.split()[0] == "jobs/a"
    assert f"pid {holder.pid}" in first
    assert first.endswith("1        nightly")
    assert "shared" in second
    assert len(cli("ls").stdout.splitlines()) == 4


def test_ls_shows_what_it_can_not_read(cli: Cli) -> None:
    """Nobody knows who holds a damaged name: "nobody" would be a guess."""
    cli.hold("jobs/a", "--note", "nightly")
    cli.hold("jobs/b")
    with closing(sqlite3.connect(cli.folder / "locks.db")) as database:
        database.execute("UPDATE name SET since = 'noon\x1b[2J' WHERE name LIKE '%jobs/b'")
        database.commit()
    result = cli("ls")
    _, first, second = result.stdout.splitlines()
    assert (result.returncode, result.stderr) == (0, "")
    assert first.endswith("nightly")
    assert second.split()[:3] == ["jobs/b", "?", "notice:"]
    assert "can't be read: its begin is 'noon" in second
    assert "\x1b" not in second


def test_ls_shows_notices_beside_holders_and_waiters() -> None:
    holder = Holder("host", 1, "thread", "nightly", "", "", Mode.EXCLUSIVE, 7, (), 0.0, 5.0)
    waiter = Waiter("host", 1, "thread", "", "", "", Mode.EXCLUSIVE, 0.0, 0)
    held = rows_of(LockInfo("x", 0, (holder,), (), "slow"))
    assert [(row[0], row[-1]) for row in held] == [("x", "nightly"), ("", "notice: slow")]
    [waited_for] = rows_of(LockInfo("x", 0, (), (waiter,), "slow"))
    assert (waited_for[1], waited_for[-1]) == ("nobody", "notice: slow")
    assert len(rows_of(LockInfo("x", 0, (holder,), ()))) == 1


def test_ls_of_nothing(cli: Cli) -> None:
    assert (cli("ls").returncode, cli("ls").stdout) == (0, "")
    assert json.loads(cli("ls", "--json").stdout) == []


def test_json_is_complete_and_has_no_secrets(cli: Cli) -> None:
    holder = cli.hold("x", "--slots", "3", "--note", "n")
    [info] = json.loads(cli("ls", "--json").stdout)
    assert info == cli.show("x") | {
        "holders": [cli.show("x")["holders"][0] | {"remaining": info["holders"][0]["remaining"]}]
    }
    [found] = info["holders"]
    assert set(found) == {
        *("host", "pid", "thread", "note", "kind", "traceparent"),
        *("mode", "token", "slots", "since", "remaining"),
    }
    assert info["kind"] == "x"
    assert (found["pid"], found["mode"], found["slots"], found["note"]) == (
        holder.pid,
        "slots",
        [0],
        "n",
    )
    assert info["limit"] == 3


def test_show(cli: Cli) -> None:
    nobody = cli("show", "x")
    assert (nobody.returncode, nobody.stdout) == (1, "nobody holds 'x'\n")
    holder = cli.hold("x")
    waiter = cli.start("run", "x", "--note", "second", "--", "true")
    until(lambda: cli.show("x")["waiters"])
    shown = cli("show", "x")
    assert shown.returncode == 0
    assert f"pid {holder.pid} (MainThread)" in shown.stdout
    assert f"pid {waiter.pid} (MainThread)" in shown.stdout
    assert shown.stdout.rstrip().endswith("second")


def test_break_ends_a_hold_and_tells_its_token(cli: Cli) -> None:
    holder = cli.hold("x")
    token = cli.show("x")["holders"][0]["token"]
    result = cli("break", "x", "--reason", "stuck since noon")
    assert result.returncode == 0
    who = f"{os.uname().nodename} pid {holder.pid} (MainThread)"
    told, fence = result.stdout.splitlines()
    assert told == f"ended the hold of 'x' with token {token}, held by {who}: stuck since noon"
    assert "fence enter --broken" in fence
    assert result.stderr == ""  # it is said once
    assert cli("show", "x").returncode == 1
    later = cli("run", "x", "-n", "--", "sh", "-c", "echo $HOLDFAST_TOKEN")
    assert int(later.stdout) > token


def test_break_of_nothing(cli: Cli) -> None:
    result = cli("break", "x", "--reason", "r")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "holdfast: nobody holds 'x'\n"
    found = json.loads(cli("break", "x", "--reason", "r", "--json").stdout)
    assert found == {"name": "x", "token": None, "reason": "r", "fences": []}


@pytest.mark.parametrize("arguments", [["x"], ["x", "--reason", " "], ["--reason", "r"]])
def test_break_needs_a_name_and_a_reason(cli: Cli, arguments: list[str]) -> None:
    result = cli("break", *arguments)
    assert result.returncode == 64
    assert result.stderr.count("\n") == 1


def test_break_asks_on_a_terminal(cli: Cli, shell: Shell) -> None:
    cli.hold("x")
    shell.run(f"{shell.holdfast} break x --reason r")
    shell.expect(r"\[y/N\] ")
    shell.type("n\n")
    shell.expect("nothing was done")
    shell.prompt()
    assert cli("show", "x").returncode == 0
    shell.run(f"{shell.holdfast} break x --reason r; echo code $?")
    shell.expect(r"\[y/N\] ")
    shell.type("\x04")  # Ctrl-D
    shell.expect(r"\r\nholdfast: nothing was done\r\ncode 1\r\n")
    shell.prompt()
    shell.run(f"{shell.holdfast} break x --reason r")
    shell.expect(r"\[y/N\] ")
    shell.type("y\n")
    shell.expect(r"ended the hold of 'x' with token \d+")
    shell.prompt()
    assert cli("show", "x").returncode == 1


def test_hostile_notes_reach_no_terminal(cli: Cli, shell: Shell) -> None:
    cli.hold("x", "--note", HOSTILE)
    for verb in ("ls", "show x", "show x --json", "run x -n -- true"):
        shell.run(f"{shell.holdfast} {verb}; echo the end")
        shown = shell.expect(r"[\s\S]*the end\r\n")
        assert "x1b[2J" in shown or "u001b[2J" in shown
        for character in "\x1b\x07\u202e\u2066\x9b":
            assert character not in shown
        shell.prompt()


def test_tables_are_prettier_with_rich_and_plain_without(cli: Cli, shell: Shell) -> None:
    cli.hold("x", "--note", "[red]not markup[/red]")
    shell.run(f"{shell.holdfast} ls")
    assert "──" in shell.expect(r"[\s\S]*\[red\]")
    shell.prompt()
    plain = "import sys; sys.modules['rich'] = None; from holdfast.cli import main; main(['ls'])"
    shell.run(f'{shell.holdfast.split()[0]} -c "{plain}"')
    assert "──" not in shell.expect(r"[\s\S]*\[red\]not markup\[/red\]\r\n")


def test_check(cli: Cli) -> None:
    result = cli("check")
    assert result.returncode == 0
    assert "guarantees EXCLUSIVE, FENCED" in result.stdout
    found = json.loads(cli("check", "--json", cli.environment["HOLDFAST_URL"]).stdout)
    assert "FENCED" in found["guarantees"]
    assert {finding["level"] for finding in found["findings"]} <= {"ok", "warning"}


def test_a_reader_that_leaves_is_not_an_error(cli: Cli) -> None:
    for name in "abcdef":
        cli("run", name, "--", "true")
    process = cli.start("ls", "--json")
    assert process.stdout is not None
    process.stdout.close()
    process.wait()
    assert process.stderr is not None
    assert process.stderr.read() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has this file")
def test_a_full_disk_is_told(cli: Cli) -> None:
    cli.hold("x")
    for verb in (["ls"], ["show", "x", "--json"], ["check"], ["schema", "postgresql"]):
        with Path("/dev/full").open("w") as full:
            result = subprocess.run(
                [*cli.command, *verb],
                env=cli.environment,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert result.returncode == 74
        told = "holdfast: standard output can't be written: No space left on device\n"
        assert result.stderr == told


@pytest.mark.parametrize("moment", [1e300, -1e300, float("inf"), float("nan")])
def test_times_that_others_wrote_are_shown(moment: float) -> None:
    """A row with a time that is none does not end the list of all others."""
    assert since(moment) == "?"
    assert duration(moment) in ("?", "0.0 s") or duration(moment).endswith(" d")
    holder = Holder("h", 1, "t", "", "", "", Mode.EXCLUSIVE, 1, (), moment, moment)
    shown = json.dumps(as_plain_data(LockInfo("a", 0, (holder,), ())), allow_nan=False)
    assert json.loads(shown)["holders"][0]["host"] == "h"
