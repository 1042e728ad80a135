"""``holdfast estimate``: what it prints, and wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.processes import Cli


def test_the_command(cli: Cli) -> None:
    words = ("estimate", "--rate", "300/m", "--hold", "20ms", "--workers", "10")
    result = cli(*words)
    assert (result.returncode, result.stderr) == (0, "")
    assert "after a crash nobody gets the lock for up to 31 s\n" in result.stdout
    assert "by then 10 wait; " in result.stdout
    assert result.stdout.rstrip().endswith("split the name.")
    printed = json.loads(cli(*words, "--store", "etcd", "--json").stdout)
    assert printed["holds_per_second"] == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--rate", "many"), "'many' is no rate"),
        (("--rate", "0"), "'0' is no rate"),
        (("--rate", "5", "--store", "foo"), "there is no store 'foo'"),
        (("--rate", "5", "--store", "redis", "--url", "local"), "give one of them"),
        (("--rate", "5", "--workers", "100001"), "100,000 at the most"),
        (("--rate", "5", "--slots", "0"), "not a whole number of 1 or more"),
    ],
)
def test_wrong_input(cli: Cli, words: tuple[str, ...], says: str) -> None:
    result = cli("estimate", "--hold", "1s", "--workers", "3", *words)
    assert result.returncode == 64
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_what_a_crash_does_to_those_who_give_up(cli: Cli) -> None:
    words = ("--rate", "10", "--hold", "10ms", "--workers", "200", "--timeout", "1s")
    assert "by then 10 wait, and 300 have given up; " in cli("estimate", *words).stdout
    assert json.loads(cli("estimate", *words, "--json").stdout)["crash_timed_out"] == 300
    slots = cli("estimate", *words, "--slots", "2").stdout
    assert "after a crash one slot is missing for up to 31 s\n" in slots


def test_a_store_is_measured(cli: Cli, tmp_path: Path) -> None:
    words = ("--rate", "5", "--hold", "100ms", "--workers", "10", "--json")
    result = cli("estimate", *words, "--url", f"sqlite:///{tmp_path}/measured.db")
    assert result.returncode == 0
    assert 0 < json.loads(result.stdout)["costs"]["free_seconds"] < 0.1
