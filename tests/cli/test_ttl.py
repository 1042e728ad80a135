"""One limit of a ttl, one exit code; verbs that take no lock need no ttl."""

from __future__ import annotations

import pytest

import holdfast
from cli.processes import Cli
from servers.redis import RedisServer


@pytest.mark.parametrize("verb", ["run", "once", "elect"])
@pytest.mark.parametrize("ttl", ["0", "1ms", "1000d", "367d"])
def test_a_ttl_that_is_not_honoured_is_wrong_usage(cli: Cli, verb: str, ttl: str) -> None:
    result = cli(verb, "x", "--ttl", ttl, "--", "true")
    assert result.returncode == 64
    assert result.stderr.count("\n") == 1
    assert "31622400 s" in result.stderr


@pytest.mark.parametrize("ttl", [0.001, 1e9])
def test_the_limits_are_the_same_everywhere(ttl: float) -> None:
    with pytest.raises(ValueError, match=r"31622400.* at most"):
        holdfast.connect("memory://limits", ttl=ttl)


def test_verbs_that_take_no_lock_need_no_ttl(cli: Cli) -> None:
    with RedisServer() as server:
        cli.environment["HOLDFAST_URL"] = f"{server.url}?loss_protection=on&max_ttl=5"
        for words in (["init"], ["check"], ["ls"]):
            result = cli(*words)
            assert (result.returncode, result.stderr) == (0, ""), words
        assert cli("break", "x", "--reason", "r").returncode == 1
        assert cli("show", "x").returncode == 1
        without = cli("run", "x", "--", "true")
        assert without.returncode == 78
        assert without.stderr.endswith("0.05 s at least and 5 s at most: choose one with --ttl\n")
        assert cli("run", "x", "--ttl", "6", "--", "true").returncode == 64
        assert cli("run", "x", "--ttl", "5", "--", "true").returncode == 0
