"""What a person at a terminal is told while a command waits."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

import holdfast
from cli.processes import Cli, until
from cli.screen import Shell
from holdfast import Holder, LockInfo, Mode
from holdfast.cli.output.text import clock
from holdfast.cli.run import waiting
from holdfast.cli.run.waiting import Waiting

NOWHERE = "redis://127.0.0.1:1/0"


def test_a_wait_names_the_holder_once(cli: Cli, shell: Shell) -> None:
    holder = cli.hold("nightly", "--note", "backup of db3")
    since = clock(cli.show("nightly")["holders"][0]["since"])
    shell.run(f"{shell.holdfast} run nightly -- echo mine at last")
    line = shell.expect(r"holdfast: [^\r]*\r\n")
    host = os.uname().nodename
    assert line == (
        f"holdfast: waiting for 'nightly', held by {host} pid {holder.pid} since {since}, "
        "note 'backup of db3'\r\n"
    )
    cli.let_go(holder)
    assert shell.expect(r"[\s\S]*at last\r\n") == "mine at last\r\n"


def test_a_store_that_can_not_be_reached_is_named(shell: Shell) -> None:
    shell.run(f"{shell.holdfast} run nightly -w 20 --url {NOWHERE} -- true")
    shell.expect(
        r"holdfast: waiting for 'nightly': redis at 127\.0\.0\.1:1 can't be [^\r]*refused; "
        r"giving up in 1\d s\r\n"
    )
    shell.type("\x03")
    shell.prompt()
    shell.run("echo code $?")
    shell.expect(r"code 130\r\n")


def test_once_and_elect_say_whom_they_wait_for(cli: Cli, shell: Shell) -> None:
    running = cli.start("once", "inv", "--", "sh", "-c", "echo up; read line")
    leading = cli.start("elect", "lead", "--", "sh", "-c", "echo up; read line")
    for process in (running, leading):
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    shell.run(f"{shell.holdfast} once inv -- true")
    shell.expect(rf"holdfast: waiting for 'inv', run by [^\r]* pid {running.pid} since \S+\r\n")
    shell.type("\x03")
    shell.prompt()
    shell.run(f"{shell.holdfast} elect lead -- true")
    shell.expect(
        rf"waiting for the leadership of 'lead', held by [^\r]* pid {leading.pid} since \S+\r\n"
    )


def test_where_nobody_looks_nothing_is_said(cli: Cli) -> None:
    cli.hold("nightly")
    result = cli("run", "nightly", "-w", "3", "--", "true")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("holdfast: 'nightly' is held by ")


class Store:
    """A client whose ``inspect`` gives what it is told, and may take its time."""

    def __init__(self, *answers: LockInfo | Exception) -> None:
        self.answers = list(answers)
        self.asked = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def inspect(self, name: str) -> LockInfo:
        self.asked.set()
        assert self.go_on.wait(60)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said; standard error is a terminal, and a second is short."""
    said: list[str] = []
    monkeypatch.setattr(waiting, "is_terminal", lambda fd: fd == 2)
    monkeypatch.setattr(waiting, "say", said.append)
    monkeypatch.setattr(waiting, "SAY_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "SILENCE_SECONDS", 0.5)
    return said


def wait_for(store: Any) -> Waiting:
    return Waiting(store, "x", shown="'x'", holds="held", seconds=30.0)


def info(*pids: int, notice: str = "") -> LockInfo:
    holders = [
        Holder("web-1", n, "t", "", "", "", Mode.SHARED, 1, (), time.time(), 9.0) for n in pids
    ]
    return LockInfo("x", 0, tuple(holders), (), notice)


def helpers() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name == "holdfast-waiting"]


def test_nothing_is_said_after_it_was_acquired(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SILENCE_SECONDS", 60.0)
    store = Store(info(1))
    store.go_on.clear()
    with wait_for(store) as wait:
        assert store.asked.wait(60)
        wait.end()
        store.go_on.set()
        until(lambda: not helpers())
    assert lines == []


def test_a_quick_acquire_asks_nothing(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SAY_AFTER_SECONDS", 60.0)
    store = Store()
    with wait_for(store) as wait:
        wait.end()
    until(lambda: not helpers())
    assert (lines, store.asked.is_set()) == ([], False)


def test_a_store_that_does_not_answer_is_said(lines: list[str]) -> None:
    store = Store(info(1))
    store.go_on.clear()
    with wait_for(store):
        until(lambda: lines)
        store.go_on.set()
        until(lambda: not helpers())
    [line] = lines  # what it answers later is not said, too
    assert line.startswith("waiting for 'x': the store has not answered yet; giving up in ")


def test_it_looks_again_where_nobody_holds_it_just_now(lines: list[str]) -> None:
    with wait_for(Store(info(), info(7, 8, 9))):
        until(lambda: lines)
    [line] = lines
    assert "held by web-1 pid 7 since " in line
    assert line.endswith(" and 2 more")


def test_the_own_hold_is_not_waited_for(lines: list[str]) -> None:
    own = info(os.getpid()).holders[0]._replace(host=os.uname().nodename)
    mine = LockInfo("x", 0, (own,), ())
    with wait_for(Store(mine, mine, mine)):
        until(lambda: lines)
    assert lines == ["waiting for 'x'"]


def test_what_the_log_has_said_is_not_said_again(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a store that grants nothing for now, which no notice of a name says."""
    said = iter([0, 1])
    monkeypatch.setattr(waiting, "lines_said", lambda: next(said))
    with wait_for(Store(info(), info(), info())):
        until(lambda: not helpers())
    assert lines == []


def test_a_notice_is_said(lines: list[str]) -> None:
    with wait_for(Store(info(notice="grants nothing before 12:05"))):
        until(lambda: lines)
    assert lines == ["waiting for 'x' (grants nothing before 12:05)"]


def test_a_final_refusal_is_left_to_the_acquire(lines: list[str]) -> None:
    with wait_for(Store(holdfast.BackendUnavailable("wrong password", final=True))):
        until(lambda: not helpers())
    assert lines == []


def test_the_same_wait_is_said_once(lines: list[str]) -> None:
    wait = wait_for(Store(info(1), info(2)))
    with wait:
        until(lambda: lines)
    with wait:  # a second campaign, without a term in between
        until(lambda: not helpers())
    assert len(lines) == 1
    wait.end()
    with wait:
        until(lambda: len(lines) == 2)
