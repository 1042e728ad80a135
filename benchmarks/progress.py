"""One line on standard error that says how far a run is."""

from __future__ import annotations

import os
import sys
import time

__all__ = ["Progress"]

WIDTH = 24


class Progress:
    """A bar on a terminal; elsewhere a line for each step."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done = steps, 0
        self._what = ""
        self._started = time.monotonic()
        self._live = os.isatty(2)

    def begin(self, what: str) -> None:
        self._what = what
        if not self._live:
            print(f"[{self._done + 1}/{self._steps}] {what}", file=sys.stderr, flush=True)
        self.tick("")

    def tick(self, detail: str) -> None:
        if not self._live:
            return
        filled = WIDTH * self._done // max(1, self._steps)
        bar = "█" * filled + "·" * (WIDTH - filled)
        spent = time.monotonic() - self._started
        text = f"{bar} {self._done}/{self._steps} {spent:4.0f} s  {self._what}  {detail}"
        sys.stderr.write(f"\r\x1b[K{text[: os.get_terminal_size(2).columns - 1]}")
        sys.stderr.flush()

    def end(self) -> None:
        self._done += 1
        if self._live and self._done == self._steps:
            sys.stderr.write("\r\x1b[K")
