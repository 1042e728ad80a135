"""What is nearly right is answered with what was probably meant."""

from __future__ import annotations

import pytest

import holdfast
from cli.processes import Cli
from holdfast.cli.main import OTHER_VERBS, VERBS, _no_verb
from holdfast.cli.parsing.parser import OTHER_OPTIONS
from holdfast.cli.run import command_line
from holdfast.url import BACKENDS, OTHER_SCHEMES


@pytest.mark.parametrize(
    ("scheme", "meant"),
    [
        ("postgres", "postgresql"),
        ("postgresql+psycopg", "postgresql"),
        ("postgresql+asyncpg", "postgresql"),
        ("postgres+psycopg", "postgresql"),
        ("mysql+pymysql", "mysql"),
        ("mariadb+asyncmy", "mysql"),
        ("valkey", "redis"),
        ("redis-sentinel", "redis+sentinel"),
        ("zookeper", "zookeeper"),
        ("reddis", "redis"),
        ("zk", "zookeeper"),
    ],
)
def test_schemes(scheme: str, meant: str) -> None:
    with pytest.raises(ValueError, match="no store is known") as refused:
        holdfast.connect(f"{scheme}://user:s3cret@host/db")
    text = str(refused.value)
    assert text.startswith(f"no store is known for {scheme}://: did you mean {meant}://? (known ")
    assert "s3cret" not in text


def test_a_scheme_that_is_like_none() -> None:
    with pytest.raises(ValueError, match=r"no store is known for ftp:// \(known are memory, "):
        holdfast.connect("ftp://host")


def test_the_words_of_others_are_ours_no_longer() -> None:
    assert set(OTHER_SCHEMES.values()) <= set(BACKENDS)
    assert not set(OTHER_SCHEMES) & set(BACKENDS)
    assert set(OTHER_VERBS.values()) <= set(VERBS)
    assert not set(OTHER_VERBS) & set(VERBS)
    ours = {name for argument in command_line().arguments for name in argument.names} | {"--yes"}
    assert set(OTHER_OPTIONS.values()) <= ours
    assert not set(OTHER_OPTIONS) & ours


@pytest.mark.parametrize("port", ["470010", "0", "65536"])
def test_ports(port: str) -> None:
    with pytest.raises(ValueError, match=rf"^{port} is not a port \(1 to 65535\)$"):
        holdfast.connect(f"redis://127.0.0.1:{port}/0")


def test_a_long_number_may_be_a_password() -> None:
    with pytest.raises(ValueError, match="is not a port") as refused:
        holdfast.connect("redis://user:31415926535")  # without its host
    assert "31415926535" not in str(refused.value)


@pytest.mark.parametrize(
    ("word", "meant"), [("list", "ls"), ("lst", "ls"), ("shwo", "show"), ("unlock", "break")]
)
def test_verbs(word: str, meant: str) -> None:
    assert f"there is no verb {word!r}: did you mean {meant}? (there are " in str(_no_verb(word))


@pytest.mark.parametrize(("word", "hint"), [("--verison", ": did you mean --version?"), ("-n", "")])
def test_options_before_the_verb(word: str, hint: str) -> None:
    expected = f"there is no option {word!r} before the verb{hint} (others follow the verb)"
    assert str(_no_verb(word)) == expected


@pytest.mark.parametrize("verb", ["run", "once", "elect"])
def test_a_command_without_dashes(cli: Cli, verb: str) -> None:
    result = cli(verb, "x", "echo", "hi")
    assert (result.returncode, result.stdout) == (64, "")
    assert "unrecognized arguments: echo hi: put -- before the command (see" in result.stderr


def test_verbs_without_a_command_have_no_dashes(cli: Cli) -> None:
    assert "--" not in cli("show", "x", "y").stderr.replace("--help", "")


def test_a_url_is_not_a_prefix(cli: Cli) -> None:
    result = cli("ls", "redis://:s3cret@127.0.0.1:1/0")
    assert (result.returncode, result.stdout) == (64, "")
    assert "a store's URL is given with --url" in result.stderr
    assert "s3cret" not in result.stderr
    assert cli("ls", "https://page").returncode == 0
