"""A terminal as a full screen: keys that come at once, its size, and its state put back at the end,
also on Ctrl-C, Ctrl-Z, SIGTERM and errors."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import shutil
import signal
import sys
import termios
import tty
from types import FrameType, TracebackType
from typing import Self

__all__ = ["Ended", "Terminal", "keys_of"]

ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
"""The alternate screen, without a cursor."""
LEAVE = "\x1b[?25h\x1b[?1049l"
PARTIAL = re.compile(rb"\x1b(?:\[[0-9;]*|O)?\Z")
"""A key that may not have arrived in full."""
REST_SECONDS = 0.05
"""How long its rest may take. After that, what arrived is a press of Esc."""
SEQUENCE = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])|\x1b|[^\x1b]")
NAMES: dict[str, str] = {
    **dict.fromkeys(("\x1b[A", "\x1bOA"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB"), "down"),
    "\x1b[5~": "page-up",
    "\x1b[6~": "page-down",
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~"), "end"),
    **dict.fromkeys(("\r", "\n"), "enter"),
    **dict.fromkeys(("\x7f", "\b"), "backspace"),
    "\x1b": "escape",
    "\x0c": "redraw",
}


class Ended(KeyboardInterrupt):
    """A signal that ends the program; the exit code is made of its number."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


def keys_of(text: str) -> list[str]:
    """The keys of what a terminal sent, by name where they have one; those that are not known are
    left out.

    >>> keys_of("j\\x1b[A\\r"), keys_of("a b"), keys_of("\\x1b[99z")
    (['j', 'up', 'enter'], ['a', ' ', 'b'], [])
    """
    found = [_name(str(part)) for part in SEQUENCE.findall(text)]
    return [key for key in found if key]


def _name(part: str) -> str:
    """The name of one key; empty for one that is not known."""
    return NAMES.get(part) or (part if part.isprintable() else "")


class Terminal:
    """The terminal of standard input and output, as a full screen for the time of a block."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._saved = termios.tcgetattr(self._in)
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._handlers: dict[int, object] = {}
        self._shown = False

    def __enter__(self) -> Self:
        table = {
            signal.SIGWINCH: self._on_change,
            signal.SIGCONT: self._on_change,
            signal.SIGTSTP: self._on_stop,
            signal.SIGTERM: self._on_end,
            signal.SIGHUP: self._on_end,
        }
        try:
            for number, handler in table.items():
                self._handlers[number] = signal.signal(number, handler)
            self._show()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hide()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        # The ends of the pipe stay open: the reader's thread may still wake this.

    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        found = shutil.get_terminal_size((80, 24))
        return max(20, found.columns), max(6, found.lines)

    def draw(self, lines: list[str]) -> None:
        """Replaces what is shown, line by line and in one write: nothing flickers."""
        if self._shown:
            body = "\x1b[K\r\n".join(lines)
            self._write(f"\x1b[H{body}\x1b[K\x1b[J")

    def read(self, seconds: float) -> str:
        """What was typed; empty after so long, or when ``wake`` was called. Raises ``EOFError`` if
        the terminal is gone."""
        ready, _, _ = select.select([self._in, self._wake_read], [], [], seconds)
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        if self._in not in ready:
            return ""
        typed = os.read(self._in, 1024)
        if PARTIAL.search(typed) and select.select([self._in], [], [], REST_SECONDS)[0]:
            typed += os.read(self._in, 1024)
        if not typed:
            raise EOFError
        return self._decoder.decode(typed)

    def wake(self) -> None:
        """Makes ``read`` return; from any thread."""
        with contextlib.suppress(BlockingIOError):  # it is woken already
            os.write(self._wake_write, b"!")

    def _show(self) -> None:
        tty.setcbreak(self._in)
        self._write(ENTER)
        self._shown = True

    def _hide(self) -> None:
        if self._shown:
            self._shown = False
            self._write(LEAVE)
        termios.tcsetattr(self._in, termios.TCSADRAIN, self._saved)

    def _write(self, text: str) -> None:
        left = text.encode(errors="backslashreplace")
        while left:
            left = left[os.write(self._out, left) :]

    def _on_change(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGCONT and not self._shown:
            self._show()
        self.wake()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its terminal as it was, and we get it again at SIGCONT."""
        self._hide()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Here it is stopped; it goes on here.
        signal.signal(signal.SIGTSTP, self._on_stop)
        if not self._shown:
            self._show()
        self.wake()

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        raise Ended(number)
