"""The command as a whole: verbs, help, errors, what it loads, what it makes of text."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

import holdfast
from cli.processes import Cli
from holdfast.cli import exits
from holdfast.cli.main import VERBS
from holdfast.cli.output.text import duration, neutral, say
from holdfast.cli.parsing.options import seconds


def test_help_names_every_verb(cli: Cli) -> None:
    for result in (cli(), cli("--help"), cli("help")):
        assert result.returncode == 0
        assert all(f"\n  {verb} " in result.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(cli: Cli, verb: str) -> None:
    result = cli(verb, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: holdfast {verb}")


def test_version(cli: Cli) -> None:
    assert cli("--version").stdout.startswith("holdfast ")


def test_an_unknown_verb(cli: Cli) -> None:
    result = cli("seize")
    assert (result.returncode, result.stdout) == (64, "")
    assert result.stderr.startswith("holdfast: there is no verb 'seize' (there are run, ")


def test_a_store_that_cannot_be_reached_is_69(cli: Cli) -> None:
    pytest.importorskip("redis")
    for verb in (["run", "x", "-n"], ["show", "x"], ["check"]):
        command = ["--", "true"] if verb[0] == "run" else []
        result = cli(*verb, "--url", "redis://:s3cret@127.0.0.1:1", *command)
        assert result.returncode == 69
        assert all(line.startswith("holdfast: ") for line in result.stderr.splitlines())
        assert "127.0.0.1:1" in result.stderr
        assert "s3cret" not in result.stderr


def test_debugging_shows_where(cli: Cli) -> None:
    result = cli("run", "x", "--url", "nonsense", "--", "true", env={"HOLDFAST_DEBUG": "1"})
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("holdfast: ")


def test_schema_of_postgresql(cli: Cli) -> None:
    assert '"locks"' in cli("schema", "postgresql", "--schema", "locks").stdout
    assert cli("schema", "oracle").returncode == 64


def test_init_of_a_store_that_needs_none(cli: Cli) -> None:
    assert cli("init").stdout == "nothing to do: this store needs no mark\n"


def test_start_up_is_light(cli: Cli) -> None:
    script = (
        "import sys; from holdfast.cli import main; code = main(['run', 'x', '--', 'true']); "
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], env=cli.environment, capture_output=True, text=True
    )
    assert result.returncode == 0
    heavy = {
        "asyncio",
        "rich",
        "ssl",
        "subprocess",
        "redis",
        "psycopg",
        "puresasl",
        "http",
        "email",
    }
    heavy |= {"argparse", "json", "logging", "pathlib", "inspect", "dataclasses", "socket"}
    heavy |= {"holdfast.stores.sqlite.queue", "holdfast.stores.sqlite.wakeups"}
    assert not heavy & set(result.stderr.split())


def test_text_that_a_terminal_would_act_on() -> None:
    assert neutral("order:42 ü 日本 [x]") == "order:42 ü 日本 [x]"
    assert neutral("a\x1b[2Jb\tc\x9b") == r"a\x1b[2Jb\tc\x9b"
    assert neutral("\u202eabc\u2066\u200b\ufeff") == r"\u202eabc\u2066\u200b\ufeff"
    assert neutral("\ud800\U000e0041") == r"\ud800\U000e0041"


def test_a_message_of_several_lines_is_one(capfd: pytest.CaptureFixture[str]) -> None:
    say("it failed: Connection refused\n\tIs the server running?\n")
    assert (
        capfd.readouterr().err == "holdfast: it failed: Connection refused Is the server running?\n"
    )


def test_durations() -> None:
    assert [seconds(text) for text in ("2", "1.5s", "250ms", "5m", "2h", "1d", "1h30m")] == [
        *(2.0, 1.5, 0.25, 300.0, 7200.0, 86400.0, 5400.0)
    ]
    for text in ("", "m", "5x", "1h-30m", "1h30", "1h 30m", "-1", "nan", "inf", "٣m", "1_0m"):
        with pytest.raises(ArgumentTypeError, match="is no duration"):
            seconds(text)
    assert [duration(value) for value in (-3, 59.9, 60, 86399, 86400)] == [
        *("0.0 s", "59 s", "1 m", "23 h", "1 d")
    ]


def test_the_reference_names_every_verb_option_and_code(cli: Cli) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    for verb in VERBS:
        assert f"| `{verb} " in page
        for option in re.findall(r"(?<=\s)--[a-z-]+", cli(verb, "--help").stdout):
            assert option in page, (verb, option)
    for name in exits.__all__:
        if name.isupper():
            assert f"\n| {getattr(exits, name)} |" in page, name


SECRET = "CaNaRy9f3kQ"


@pytest.mark.parametrize(
    "words",
    [
        ["check", f"redis://:{SECRET}@h", f"redis://:{SECRET}@h"],
        ["run", "n", f"redis://:{SECRET}@h", "--", "true"],
        ["run", "n", f"--ulr=redis://:{SECRET}@h", "--", "true"],
        ["run", "n", f"--ttl=redis://u:a {SECRET}'@h", "--", "true"],
        ["schema", f"postgresql://u:{SECRET}@h/d"],
        ["fence", f"postgresql://u:{SECRET}@h/d#x", "enter", "x"],
        [f"redis://:{SECRET}@h"],
        ["fence", "enter", f"postgresql://u:{SECRET}%zz@127.0.0.1:1/d#x", "1;exclusive;;0;1;x"],
        ["check", f"redis://u:12/{SECRET}@h/0"],
    ],
    ids=lambda words: " ".join(words).replace(SECRET, "…")[:40],
)
def test_errors_do_not_repeat_urls(cli: Cli, words: list[str]) -> None:
    """Terminals are shared, and logs of schedulers kept."""
    for debug in ("", "1"):
        result = cli(*words, env={"HOLDFAST_DEBUG": debug})
        assert result.returncode in (64, 69, 78), result.stderr
        assert SECRET not in result.stderr + result.stdout


def test_the_url_in_a_file(cli: Cli, tmp_path: Path) -> None:
    """A command line can be seen by every user of the machine."""
    kept = tmp_path / "url"
    kept.write_text(cli.environment.pop("HOLDFAST_URL") + "\n")
    cli.environment["HOLDFAST_URL_FILE"] = str(kept)
    holder = cli.hold("x")
    assert cli.show("x")["holders"][0]["pid"] == holder.pid
    cli.let_go(holder)
    result = cli("ls", env={"HOLDFAST_URL_FILE": "/nowhere"})
    assert result.returncode == 78
    assert "HOLDFAST_URL_FILE: '/nowhere' can't be read" in result.stderr


def test_an_empty_file_is_no_url(cli: Cli) -> None:
    """A secret that is not mounted yet must not make a fleet lock each its own machine."""
    del cli.environment["HOLDFAST_URL"]
    result = cli("run", "x", "--", "echo", "ran", env={"HOLDFAST_URL_FILE": "/dev/null"})
    assert result.returncode == 78
    assert "HOLDFAST_URL_FILE: '/dev/null' is empty" in result.stderr
    assert "ran" not in result.stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (holdfast.BackendUnavailable("refused"), 69),
        (holdfast.BackendUnavailable("wrong password", final=True), 78),
        (holdfast.LockTimeout("held"), 75),
        (holdfast.LockLost("gone"), 76),
        (holdfast.Unsupported("no slots"), 78),
        (holdfast.InvalidName("empty"), 64),
        (ValueError("limit"), 64),
        (OSError(errno.ENOSPC, "full"), 74),
        (PermissionError(errno.EACCES, "no"), 70),
        (OSError(errno.ENOMEM, "no memory"), 70),
        (RuntimeError("?"), 70),
    ],
    ids=repr,
)
def test_each_error_has_its_code(error: Exception, code: int) -> None:
    assert exits.code_for(error) == code
