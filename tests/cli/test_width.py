"""Tables and help fit the terminal."""

from __future__ import annotations

import sys

import pytest

from cli.processes import Cli
from cli.screen import Shell
from holdfast.cli.main import VERBS
from holdfast.cli.output import tables
from holdfast.cli.output.tables import print_table
from holdfast.cli.output.text import columns, wrap

HEADINGS = ("NAME", "HELD BY", "MODE", "TOKEN", "SINCE", "LEFT", "WAITING", "NOTE")
ROWS = [
    (
        *("nightly", "web-1 pid 4711", "exclusive", "1794962919598651", "00:48:39 (3 m)"),
        *("29 s", "2", "backup of the customer database number three, weekly, 毎週日曜日"),
    ),
    ("", "web-2 pid 812", "shared", "1794962919598652", "00:48:40 (3 m)", "29 s", "", ""),
    ("a-name-without-any-blank-" * 4, "?", "", "", "", "", "", "notice: it can't be read"),
]


@pytest.fixture(params=["rich", "plain"])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(tables, "is_terminal", lambda fd: fd == 1)
    monkeypatch.setenv("TERM", "dumb")
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "rich", None)
    return str(request.param)


@pytest.mark.parametrize("width", [30, 50, 80, 120, 400])
def test_a_table_fits_the_terminal(
    width: int, looks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(HEADINGS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert all(line.strip() for line in lines)
    assert max(columns(line.rstrip()) for line in lines) <= width
    assert sum("──" in line for line in lines) <= (looks == "rich")
    shown = "".join("".join(lines).split())
    for cell in (cell for row in ROWS for cell in row[:-1] if len(cell) < 20):
        assert "".join(cell.split()) in shown
    if width == 400:
        assert len(lines) == 1 + len(ROWS) + (looks == "rich")


@pytest.mark.parametrize(("width", "left_out"), [(130, 0), (105, 1), (90, 2)])
def test_spare_columns_are_left_out_first(
    width: int,
    left_out: int,
    looks: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(HEADINGS, ROWS, spare=("TOKEN", "MODE"))
    head = capsys.readouterr().out.splitlines()[0].split()
    assert ("TOKEN" not in head) + ("MODE" not in head) == left_out


def test_empty_columns_go_before_anything_is_wrapped(
    looks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    print_table(("HELD BY", "NOTE"), [("web-1 pid 4711 (MainThread)", "")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["HELD", "BY"]
    assert lines[-1].strip() == "web-1 pid 4711 (MainThread)"


def test_elsewhere_each_row_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(HEADINGS, ROWS, spare=("TOKEN", "MODE"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(ROWS)
    assert lines[0].split() == " ".join(HEADINGS).split()
    assert lines[1].endswith("毎週日曜日")


def test_ls_fits_a_narrow_terminal(cli: Cli, shell: Shell) -> None:
    cli.hold("nightly", "--note", "backup of the customer database number three")
    for width in (50, 80):
        shell.run(f"stty cols {width}; {shell.holdfast} ls; stty cols 300; echo the end")
        lines = shell.expect(r"[\s\S]*the end\r\n").splitlines()
        assert max(map(len, lines)) <= width
        assert any("backup of the" in line for line in lines)
        shell.prompt()


@pytest.mark.parametrize("verb", ["", *VERBS])
@pytest.mark.parametrize("width", [50, 80])
def test_help_fits_the_terminal(cli: Cli, verb: str, width: int) -> None:
    shown = cli(*filter(None, [verb]), "--help", env={"COLUMNS": str(width)}).stdout
    assert max(map(len, shown.splitlines())) <= width


def test_help_in_a_pipe_fits_a_usual_terminal(cli: Cli) -> None:
    """Such as `holdfast run --help | less`."""
    shown = cli("run", "--help", env={"COLUMNS": ""}).stdout
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("held by web-1", 8, ["held by", "web-1"]),
        ("two  blanks", 11, ["two  blanks"]),
        ("日本語", 4, ["日本", "語"]),
        ("ab 0123456789", 4, ["ab", "0123", "4567", "89"]),
    ],
)
def test_wrap(text: str, width: int, lines: list[str]) -> None:
    assert wrap(text, width) == lines
