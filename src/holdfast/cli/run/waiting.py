"""The one line that tells a person at a terminal what a command waits for, and who has it."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from holdfast.cli.output.text import clock, duration, is_terminal, lines_said, say
from holdfast.io.clock import where

if TYPE_CHECKING:
    from holdfast import LockInfo, Locks

__all__ = ["Waiting"]

SAY_AFTER_SECONDS = 1.0
"""A shorter wait is not worth a line."""
SILENCE_SECONDS = 1.0
"""If the store has not told the holder after so long, that is said instead."""
MOST_LOOKS = 3
"""How often to look for a holder, a second apart: a name can be between two holders."""


class Waiting:
    """A context manager around an acquire. If the acquire takes longer than a second and standard
    error is a terminal, one line says what it waits for.

    The store is asked from a thread of its own, so the acquire is not delayed. Nothing is said
    after ``end``, which the caller calls when the lock is acquired. It can be entered again: what
    was said is not repeated until the lock was acquired.
    """

    def __init__(
        self, locks: Locks, name: str, *, shown: str, holds: str, seconds: float | None
    ) -> None:
        """``shown`` and ``holds`` are words of the line: for what, and what its holder does to
        it. ``seconds`` is how long the caller tries a store that can't be reached, if it gives up
        at all."""
        self._locks, self._name = locks, name
        self._for, self._holds = f"waiting for {shown}", holds
        self._seconds = seconds
        self._began = 0.0
        self._over = threading.Event()
        self._said = False

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._over = threading.Event()
        if is_terminal(2) and not self._said:
            threading.Thread(target=self._tell, name="holdfast-waiting", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()

    def end(self) -> None:
        """It is acquired: nothing more is said before the next wait."""
        self._over.set()
        self._said = False

    def _tell(self) -> None:
        from holdfast.errors import BackendUnavailable

        found, before = "", lines_said()
        for _ in range(MOST_LOOKS):
            if self._over.wait(SAY_AFTER_SECONDS):
                return
            # A store that does not answer must not delay the line, too.
            silence = threading.Timer(SILENCE_SECONDS, self._say_silence)
            silence.daemon = True
            silence.start()
            try:
                found = self._describe(self._locks.inspect(self._name))
            except BackendUnavailable as error:
                if not error.final:  # else the acquire raises it itself
                    self._say(f": {str(error).rstrip('.')}{self._giving_up()}")
                return
            except Exception:  # noqa: BLE001 - the acquire meets it, too, and reports it
                return
            finally:
                silence.cancel()
            if found:
                break
        if found or lines_said() == before:  # a store may have told the reason in the log
            self._say(found)

    def _say_silence(self) -> None:
        self._say(f": the store has not answered yet{self._giving_up()}")

    def _say(self, why: str) -> None:
        if not self._said and not self._over.is_set():
            self._said = True
            say(f"{self._for}{why}")

    def _describe(self, info: LockInfo) -> str:
        """Who has it; "" if the store names nobody."""
        notice = f" ({info.notice})" if info.notice else ""
        others = [who for who in info.holders if (who.host, who.pid) != where()]
        if not others:  # or this process, which has just acquired it
            return notice
        first, *others = others
        note = f", note {first.note!r}" if first.note else ""
        more = f" and {len(others)} more" if others else ""
        who = f"{first.host} pid {first.pid} since {clock(first.since)}{note}"
        return f", {self._holds} by {who}{more}{notice}"

    def _giving_up(self) -> str:
        if self._seconds is None:
            return ""
        left = self._seconds - (time.monotonic() - self._began)
        return f"; giving up in {duration(left)}" if left >= 1 else ""
