"""How soon one who waits looks again by itself, where the votes do not tell the whole story.

Who waits hears of a release from one node, and may come before the others have let go, or find
the votes of one who came to nothing and of whom nobody tells. Nobody calls a second time then. So
whoever can't see that somebody holds a majority, or was called and still sees the holder of
before, looks again soon, and then less and less often. Otherwise the next call is waited for.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.claim import Busy
from holdfast.core.contract import Runtime
from holdfast.stores.redlock.votes import Ballot

__all__ = ["Patience"]

FIRST_LOOK_SECONDS = 0.02
MOST_LOOKS = 9
"""Each after twice the time of the one before: the last comes later than a re-check would."""
KEPT_WAITERS = 4096


class _Look(NamedTuple):
    holder: bytes
    """Who was seen to hold a majority; empty if nobody was."""
    calls: int
    """How often the name had been called when this was first seen."""
    looks: int
    """How often it was looked at again since; ``MOST_LOOKS`` if nothing is strange about it."""


class Patience:
    """What the waiters of a backend saw last."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last: dict[str, _Look] = {}

    def tempered(self, owner: str, ballot: Ballot, answer: Busy, calls: int) -> Busy:
        """The answer, with an earlier moment to look again where that is wise. ``calls`` is how
        often the name had been called before these votes were asked for."""
        look = self._next(self._last.get(owner), ballot.holder(), calls)
        if len(self._last) >= KEPT_WAITERS:
            self._last.clear()
        self._last[owner] = look
        if look.looks >= MOST_LOOKS:
            return answer
        pause = FIRST_LOOK_SECONDS * 2**look.looks * self._runtime.between(0.5, 1.0)
        if answer.retry_seconds is not None and answer.retry_seconds < pause:
            return answer
        return answer._replace(retry_seconds=pause)

    def _next(self, last: _Look | None, holder: bytes, calls: int) -> _Look:
        if last is None or holder != last.holder:
            return _Look(holder, calls, MOST_LOOKS if holder else 0)
        if calls != last.calls:  # and yet it is the same as before
            return _Look(holder, calls, 0)
        return last._replace(looks=min(MOST_LOOKS, last.looks + 1))

    def forget(self, owner: str) -> None:
        """It waits no more."""
        self._last.pop(owner, None)
