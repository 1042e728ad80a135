"""A plain command line means the same to us as to argparse; any other is argparse's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cli.exits import Refused
from holdfast.cli.parsing.full import full_parser
from holdfast.cli.parsing.options import json_option, store_options
from holdfast.cli.parsing.parser import Parser
from holdfast.cli.run import command_line

OPTIONS = [name for argument in command_line().arguments for name in argument.names]
VALUES = ["x", "", "5", "0", "5m", "-5", "-", "a b", "a=b", "=", "sqlite:///f?x=1", "name", "-h2"]
WORDS = st.one_of(
    st.sampled_from([*OPTIONS, *VALUES, "--", "--no-such", "-q", "-nw5", "-w5"]),
    st.builds("{}={}".format, st.sampled_from(OPTIONS), st.sampled_from(VALUES)),
)


def plain(parser: Parser, argv: list[str]) -> SimpleNamespace | None:
    try:
        return parser.read_plain(argv)
    except Exception:
        return None


@given(st.lists(WORDS, max_size=7))
@settings(max_examples=500)
def test_what_is_plain_means_the_same_to_argparse(argv: list[str]) -> None:
    found = plain(command_line(), argv)
    if found is not None:
        assert found == full_parser(command_line()).parse_args(argv, SimpleNamespace())


@pytest.mark.parametrize(
    "argv",
    [
        ["x"],
        ["x", "--url", "sqlite:///f"],
        ["--url=sqlite:///f", "x", "-n", "--slots", "3"],
        ["-w", "5m", "x", "--note=-", "--ttl", "10", "-E", "3"],
    ],
)
def test_the_usual_is_plain(argv: list[str]) -> None:
    found = plain(command_line(), argv)
    assert found == full_parser(command_line()).parse_args(argv, SimpleNamespace())


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        ([], "required: NAME"),
        (["x", "y"], "unrecognized arguments: y: put -- before the command"),
        (["x", "echo", "-l"], "unrecognized arguments: echo -l: put -- before the command"),
        (["x", ""], "unrecognized arguments: "),
        (["x", "--timeout", "5"], "arguments: --timeout 5: did you mean --wait?"),
        (["x", "--expire=5"], "arguments: --expire=5: did you mean --ttl?"),
        (["x", "--json"], "unrecognized arguments: --json (see"),
        (["x", "-n", "-w", "5"], "-w/--wait: not allowed with argument -n/--nonblock"),
        (["x", "--ttl", "0"], "--ttl: '0' must be more than 0, and 31622400 s (366d) at most"),
        (["x", "--slots"], "--slots: expected one argument"),
        (["x", "--wai", "5"], "unrecognized arguments: --wai 5: did you mean --wait?"),
    ],
)
def test_what_is_wrong_is_told_by_argparse(argv: list[str], answer: str) -> None:
    with pytest.raises(Refused, match="see holdfast run --help") as refused:
        command_line().parse_args(argv)
    assert answer in str(refused.value)


def test_a_verb_that_declares_more_is_read_by_argparse() -> None:
    parser = Parser("ls", "Lists.")
    parser.add_argument("prefix", nargs="?", default="")
    json_option(parser)
    store_options(parser)
    assert plain(parser, ["a"]) is None
    assert parser.parse_args(["a", "--json"]).prefix == "a"
