"""``holdfast top``: drawn to fit, driven by keys, and the terminal is left as it was."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import sys
import threading
import tty
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.processes import Cli, until
from cli.screen import Shell
from holdfast import Finding, Holder, LockInfo, Mode, Waiter
from holdfast.cli.output.text import columns
from holdfast.cli.top.screen import Screen
from holdfast.cli.top.terminal import Terminal, keys_of
from holdfast.dashboard.watch import Watch

NOW = 1_000_000.0
HOSTILE = "[bold]x[/bold]\x1b[2J\x07\u202e日本語 "
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def info(name: str, waiters: int = 0, note: str = "") -> LockInfo:
    holder = Holder("web-1", 4711, "main", note, "", "", Mode.EXCLUSIVE, 2**62, (), NOW - 75, 20)
    waiting = Waiter("web-2", 812, "main", note, "", "", Mode.EXCLUSIVE, NOW - 70, 2)
    return LockInfo(name, 0, (holder,), (waiting,) * waiters, note)


def screen_of(*infos: LockInfo) -> Screen:
    watch = Watch(lambda: 5.0, lambda: NOW)
    watch.read(infos, 4.0)
    watch.checked([Finding("file", HOSTILE), Finding("eviction", "keys may go", "warning")])
    watch.broke("a", infos[0].holders if infos else (), HOSTILE)
    return Screen(watch, f"redis://{HOSTILE}")


def text_of(screen: Screen, width: int = 80, height: int = 24) -> list[str]:
    lines = [ANSI.sub("", line) for line in screen.lines(width, height)]
    assert len(lines) == height
    assert max(map(columns, lines)) <= width
    return lines


@pytest.mark.parametrize("size", [(80, 24), (50, 24), (20, 6), (200, 60)])
@pytest.mark.parametrize("view", ["list", "tree", "name", "changes", "help"])
def test_every_view_fits_and_is_harmless(view: str, size: tuple[int, int]) -> None:
    screen = screen_of(*(info(f"{n}{HOSTILE}", n % 3, HOSTILE * 9) for n in range(300)))
    screen.lines(*size)
    screen.show(view) if view != "list" else None
    screen.message = HOSTILE
    for prompt in ("", HOSTILE * 30):
        screen.prompt = prompt
        drawn = "\n".join(screen.lines(*size))
        assert not re.search(r"\x1b(?!\[[0-9;]*m)|\x07|\u202e", drawn)
        text_of(screen, *size)


def test_what_waits_longest_comes_first_and_markup_is_text() -> None:
    screen = screen_of(info("calm"), info("[red]order[/red]", 2, "a note"))
    title, status, headings, first, second, *_ = text_of(screen)
    assert title.rstrip().endswith("1 s old")
    assert "waiting 6  longest 1 m" in status
    assert headings.split() == ["NAME", "WAIT", "LINE", "HELD", "BY", "HELD", "LEFT"]
    assert first.split()[:4] == ["[red]order[/red]", "1", "m", "6"]
    assert second.startswith("calm")
    assert "a note" not in first
    assert "a note" in text_of(screen, 120)[3]
    assert "HELD BY" in text_of(screen, 50)[2]
    assert "LEFT" not in text_of(screen, 50)[2]


def test_a_selected_name_stays_selected_when_others_move() -> None:
    screen = screen_of(*(info(f"n{n:05}") for n in range(10_000)))
    text_of(screen)
    screen.move(5000)
    assert screen.selected == "n05000"
    assert any(line.startswith("n05000") for line in text_of(screen))
    screen.watch.read([info("n05000"), info("x", 3)], 4.0)
    text_of(screen)
    assert screen.selected == "n05000"
    screen.watch.read([info("x", 3)], 4.0)
    text_of(screen)
    assert screen.selected == "x"


def test_stale_and_failed_readings_are_told() -> None:
    at = [0.0]
    screen = Screen(Watch(lambda: at[0], lambda: NOW), "redis://cache")
    assert "not read yet" in "".join(text_of(screen))
    screen.watch.read([info("a")], 0.0)
    at[0] = 11.0
    assert "STALE 11 s old" in text_of(screen)[0]
    screen.watch.failed(ConnectionError("refused\x1b[2J"))
    assert text_of(screen)[1].startswith(r"the store can't be read: refused\x1b[2J")


def test_rows_age_without_news() -> None:
    """Of a store that hangs: what was read a minute ago has waited for a minute more."""
    at = [0.0]
    screen = Screen(Watch(lambda: at[0], lambda: NOW + at[0]), "redis://cache")
    screen.watch.read([info("a", 1)], 0.0)
    texts = []
    for at[0] in (0.0, 15.0, 60.0):
        _, status, _, row, *_ = text_of(screen)
        texts.append((status.split("longest ")[1][:3], row.split()[1:3], row.split()[-4:]))
    assert texts == [
        ("1 m", ["1", "m"], ["1", "m", "20", "s"]),
        ("1 m", ["1", "m"], ["1", "m", "5", "s"]),
        ("2 m", ["2", "m"], ["2", "m", "0.0", "s"]),
    ]
    screen.show("name")
    assert "left 0.0 s" in "\n".join(text_of(screen))


def test_a_name_is_opened_with_all_that_is_known() -> None:
    screen = screen_of(info("order:42", 2, "charging"))
    text_of(screen)
    screen.show("name")
    shown = "\n".join(text_of(screen))
    for text in ("web-1 pid 4711 (main)", str(2**62), "note: charging", "6 waiting", "2 more of"):
        assert text in shown


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        ("jk/", ["j", "k", "/"]),
        ("\x1b[A\x1bOB\x1b[5~\x1b[6~", ["up", "down", "page-up", "page-down"]),
        ("a b", ["a", " ", "b"]),
        ("\r\x7f\x1b", ["enter", "backspace", "escape"]),
        ("\x1b[200~\x01é", ["é"]),
    ],
)
def test_keys(typed: str, keys: list[str]) -> None:
    assert keys_of(typed) == keys


def test_a_key_that_arrives_in_two_parts_is_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a slow ssh. The Esc in front would clear the filter, or go back."""
    keyboard, screen = pty.openpty()
    tty.setraw(screen)
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, SimpleNamespace(fileno=lambda: screen))
    terminal = Terminal()
    os.write(keyboard, b"\x1b")
    assert keys_of(terminal.read(30)) == ["escape"]
    monkeypatch.setattr("holdfast.cli.top.terminal.REST_SECONDS", 30.0)
    for first, rest, key in (
        (b"\x1b", b"[A", "up"),
        (b"\x1b[6", b"~", "page-down"),
        (b"\x1bO", b"B", "down"),
    ):
        os.write(keyboard, first)
        later = threading.Timer(0.05, os.write, (keyboard, rest))
        later.start()
        assert keys_of(terminal.read(30)) == [key]
        later.join()
    os.close(keyboard)
    os.close(screen)


def test_at_fifty_columns_nothing_that_matters_is_cut() -> None:
    screen = screen_of(info("a", 2))
    screen.watch.counts["lost"] = 1
    assert text_of(screen, 50)[1] == "waiting 6  longest 1 m  lost 1  broken 1  check: c"
    screen.watch.counts |= {"lost": 0, "broken": 0}
    assert "broken" not in text_of(screen, 50)[1]
    assert "lost 0  broken 0  check: press c" in text_of(screen, 80)[1]


class Top:
    """``holdfast top`` in a shell's terminal."""

    def __init__(self, shell: Shell, columns: int = 80) -> None:
        self.shell = shell
        self.command = f"TERM=xterm {shell.holdfast} top"
        shell.run(f"stty cols {columns} rows 24; bind 'set enable-bracketed-paste off'; clear")
        shell.prompt()

    def settings(self) -> str:
        """How the terminal is set."""
        self.shell.run("stty -g; echo .")
        found = self.shell.expect(r"[0-9a-f:]{20,}\r\n")
        self.shell.prompt()
        return found

    def start(self) -> None:
        self.shell.run(self.command)
        self.shell.expect(r"\x1b\[\?1049h")

    def left(self) -> None:
        """Waits until the screen and the cursor are given back, and the shell is."""
        self.shell.expect(r"\x1b\[\?25h\x1b\[\?1049l")
        self.shell.prompt()

    def code(self) -> int:
        self.shell.run("echo code $?")
        found = self.shell.expect(r"code \d+\r\n")
        self.shell.prompt()
        return int(found.split()[1])


@pytest.fixture
def top(shell: Shell) -> Iterator[Top]:
    yield Top(shell)
    os.kill(shell.pid, signal.SIGKILL)  # also if a program has the terminal still


def test_keys_sort_filter_open_and_quit(cli: Cli, top: Top) -> None:
    cli.hold("nightly", "--note", "weekly backup")
    before = top.settings()
    top.start()
    top.shell.expect(r"nightly .*pid \d+")
    top.shell.type("\r")
    top.shell.expect(r"note: weekly backup")
    top.shell.type("\x1b")
    top.shell.expect(r"NAME")
    top.shell.type("/absent\r")
    top.shell.expect(r"nothing matches")
    top.shell.type("\x1b")
    top.shell.expect(r"nightly")
    top.shell.type("s")
    top.shell.expect(r"sort: queue")
    top.shell.type("t")
    top.shell.expect(r"nobody waits for anything")
    top.shell.type("q")
    top.left()
    assert top.code() == 0
    assert top.settings() == before


def test_a_break_asks_for_a_reason_and_for_yes(cli: Cli, top: Top) -> None:
    holder = cli.hold("nightly")
    top.start()
    top.shell.expect(r"nightly")
    for answer, outcome in (("n", "nothing was done"), ("y", "broke 'nightly': the hold with")):
        top.shell.type("b")
        top.shell.expect(r"why break nightly\?")
        top.shell.type("\r")  # no reason, no break
        top.shell.type("host is gone\r")
        top.shell.expect(r"goes on until its\s.*next renewal")
        top.shell.type(answer)
        top.shell.expect(outcome)
    top.shell.type("c")
    top.shell.expect(r"broken.* nightly .*host is gone")
    top.shell.type("q")
    top.left()
    assert holder.wait(60) == 76
    assert holder.stderr is not None
    assert "host is gone" in holder.stderr.read()


def test_a_long_name_leaves_room_for_the_question(cli: Cli, top: Top) -> None:
    cli.hold("x" * 300 + ": shall we go on watching")
    top.start()
    top.shell.expect(r"xxx")
    top.shell.type("b")
    top.shell.expect(r"why break x+….*watching\?")
    top.shell.type("reason\r")
    top.shell.expect(r"break x+….*watching, held by")
    top.shell.type("nq")
    top.left()


def test_what_was_typed_ahead_is_no_yes(cli: Cli, top: Top) -> None:
    """Of a text that is pasted as a reason, the next line may begin with a y."""
    cli.hold("nightly")
    top.start()
    top.shell.expect(r"nightly")
    top.shell.type("bhost is gone\ryes, it is")
    top.shell.expect(r"goes on until its\s.*next renewal")
    top.shell.type("n")
    top.shell.expect("nothing was done")
    top.shell.type("q")
    top.left()
    assert cli.show("nightly")["holders"]


@pytest.mark.parametrize(("sent", "code"), [("\x03", 130), (signal.SIGTERM, 143)])
def test_the_terminal_is_restored_when_it_is_interrupted(
    cli: Cli, top: Top, sent: str | signal.Signals, code: int
) -> None:
    before = top.settings()
    top.start()
    top.shell.expect(r"nothing is held")
    if isinstance(sent, str):
        top.shell.type(sent)
    else:
        os.kill(pid_of_top(top.shell.pid), sent)
    top.left()
    assert top.code() == code
    assert top.settings() == before


def test_the_terminal_is_restored_when_it_is_stopped_and_continued(cli: Cli, top: Top) -> None:
    before = top.settings()
    top.start()
    top.shell.expect(r"nothing is held")
    top.shell.type("\x1a")
    top.shell.expect(r"\x1b\[\?1049l")
    top.shell.expect(r"Stopped")
    top.shell.prompt()
    assert top.settings() == before
    top.shell.run("stty cols 50; fg")
    top.shell.expect(r"\x1b\[\?1049h")
    top.shell.expect(r"s: wait")  # the keys of a narrow terminal
    top.shell.type("q")
    top.left()
    assert top.settings() == before


def test_it_follows_the_size_of_the_terminal(cli: Cli, top: Top) -> None:
    top.start()
    top.shell.expect(r"sort: wait")
    top.shell.resize(50, 24)
    top.shell.expect(r"s: wait")
    top.shell.type("q")
    top.left()


def pid_of_top(shell: int) -> int:
    """The one child of the shell, when it is there."""
    children: list[str] = []

    def found() -> bool:
        children[:] = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        return len(children) == 1

    until(found)
    return int(children[0])


def test_once_prints_a_table_for_scripts(cli: Cli) -> None:
    cli.hold("order:1", "--note", "x\x1b[2J")
    cli.hold("order:2")
    waiting = cli.start("run", "order:2", "--", "true")
    until(lambda: cli.show("order:2")["waiters"])
    shown = cli("top", "--once")
    heading, first, second = shown.stdout.splitlines()
    assert heading.split() == ["NAME", "WAIT", "LINE", "HELD", "BY", "HELD", "LEFT", "NOTE"]
    assert (first.split()[0], second.split()[0]) == ("order:2", "order:1")
    assert "\x1b" not in shown.stdout
    [row] = json.loads(cli("top", "--json", "--filter", "order:2").stdout)
    assert (row["name"], row["kind"], row["waiting"]) == ("order:2", "order", 1)
    assert row["wait_seconds"] > 0
    assert waiting.poll() is None


def test_what_top_can_not_do_is_told(cli: Cli) -> None:
    refused = cli("top")
    assert (refused.returncode, "--once prints one table" in refused.stderr) == (64, True)
    refused = cli("top", "--once", "--sort", "colour")
    assert (refused.returncode, "one of wait, queue" in refused.stderr) == (64, True)
    away = cli("top", "--once", "--url", "redis://127.0.0.1:1/0")
    assert away.returncode == 69


def test_without_rich_it_says_what_to_install(cli: Cli, top: Top) -> None:
    program = (
        "import sys; sys.modules['rich'] = sys.modules['rich.console'] = None; "
        "from holdfast.cli import main; sys.exit(main(['top']))"
    )
    top.shell.run(f'TERM=xterm {sys.executable} -c "{program}"')
    top.shell.expect(r"pip install 'holdfast\[cli\]'")
    top.shell.prompt()
    assert top.code() == 78
