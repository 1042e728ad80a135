"""An observer that remembers what it was told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast import observe

SOON = 30.0


class Recorder(observe.Observer):
    """Every event in its order, with the thread on which it was told."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.threads: dict[str, set[str]] = {}

    def words(self, *without: str) -> list[str]:
        return [event.word for event in self.events if event.word not in without]

    def of(self, word: str) -> list[Any]:
        return [event for event in self.events if event.word == word]

    def wait_for(self, word: str, count: int = 1) -> Any:
        """The last of so many events, which may still have to come."""
        wait_until(lambda: len(self.of(word)) >= count, f"{word}, got {self.words()}")
        return self.of(word)[count - 1]

    def _tell(self, event: Any) -> None:
        self.threads.setdefault(event.word, set()).add(threading.current_thread().name)
        self.events.append(event)

    waiting = acquired = timed_out = cancelled = renewed = doubtful = lost = released = _tell
    broken = unreachable = reachable = refused = ran = leading = requested = _tell


def wait_until(condition: Callable[[], bool], what: str, seconds: float = SOON) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"did not happen: {what}"
        time.sleep(0.01)
