"""Processes that wait for each other, on every store: the circle is in the log and in the error."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from harnesses import harness_classes
from holdfast.testing import Flavour, Harness

PROGRAM = Path(__file__).with_name("deadlock_member.py")
TOLD_AFTER, LONG = 5.0, 40.0
"""Timeouts of the member that gives up, and of the others."""
WITHOUT_WAITERS = {"redlock"}
"""Stores that have no line, and so show no waiters."""
STORES = [
    name
    for name, kind in harness_classes().items()
    if not kind.repeats and kind.between_processes and name not in WITHOUT_WAITERS
]
SOME_STORES = [name for name in ("redis", "postgres", "etcd", "sqlite") if name in STORES]


def on(names: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("harness", names, indirect=True, scope="session")


def play(harness: Harness, flavours: Sequence[Flavour], *, circle: bool = True) -> list[Any]:
    """What processes tell that hold ``n0``, ``n1`` … and wait for the next name; the last one for
    ``n0``, or for nothing that is held."""
    namespace, count = f"t{secrets.token_hex(6)}", len(flavours)
    with ExitStack() as stack:
        members = []
        for number, flavour in enumerate(flavours):
            last = number == count - 1
            following = "n0" if last and circle else f"n{number + 1}"
            timeout = LONG if number else TOLD_AFTER
            what = [harness.url, namespace, flavour, f"n{number}", following, timeout]
            members.append(stack.enter_context(started(what)))
        for member in members:
            assert member.stdout is not None
            assert member.stdout.readline() == "held\n"
        for member in members:
            assert member.stdin is not None
            member.stdin.write("go\n")
            member.stdin.flush()
        return [json.loads(member.communicate(timeout=60)[0]) for member in members]


def started(what: list[Any]) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), json.dumps(what)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@on(SOME_STORES)
@pytest.mark.parametrize("flavour", list(Flavour))
def test_two_processes_that_wait_for_each_other(harness: Harness, flavour: Flavour) -> None:
    first, second = play(harness, [flavour, flavour])
    assert first["deadlock"] == ["n1", "n0"]
    assert "deadlock: 'n1' is held by " in first["error"]
    assert first["lines"] == [["n1", "n0"]]
    assert second == {"error": "", "deadlock": [], "lines": [["n0", "n1"]]}


@on(STORES)
def test_three_processes_of_both_clients(harness: Harness) -> None:
    first, *others = play(harness, [Flavour.ASYNCIO, Flavour.BLOCKING, Flavour.ASYNCIO])
    assert first["deadlock"] == ["n1", "n2", "n0"]
    assert first["lines"] == [["n1", "n2", "n0"]]
    assert [each["lines"] for each in others] == [[["n2", "n0", "n1"]], [["n0", "n1", "n2"]]]
    assert [each["error"] for each in others] == ["", ""]


@on(STORES[:1])
def test_processes_in_a_chain_are_no_deadlock(harness: Harness) -> None:
    """The last one gets what it waits for, and so do all before it."""
    told = play(harness, [Flavour.BLOCKING] * 3, circle=False)
    assert told == [{"error": "", "deadlock": [], "lines": []}] * 3
