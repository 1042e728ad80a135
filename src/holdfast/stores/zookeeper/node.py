"""One claim of this process on ZooKeeper, its node in the line, and who decides over both.

Several threads have a hand in a node at the same time: its owner's lets it in, another that
releases in its favour does so too, the renewer renews it, and the session's ends what nobody keeps
or comes for. Whoever ends it deletes it, and then nobody may be let in by it: not even one who
saw a moment ago that it was its turn. So a node has a chain of terms, and each decision is the
next one: two that are taken at once are taken one after the other, the second by what the first
has made of it. No mutex is needed for that, which a signal's handler could find taken by its own
thread: what follows a term is said in one step, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.claim import Claim, Grant
from holdfast.core.contract import GRACE_SECONDS, STALE_SECONDS

if TYPE_CHECKING:
    from holdfast.stores.zookeeper.client.calls import Wake
    from holdfast.stores.zookeeper.wakeups import Preview

__all__ = ["Attendance", "Entry", "Node", "Term"]


class Term:
    """What was decided over a node: for which hold it stands and until when, or that it is over."""

    __slots__ = ("after", "ends", "grant", "over")

    def __init__(
        self, grant: Grant | None = None, ends: float = math.inf, *, over: bool = False
    ) -> None:
        self.grant, self.ends, self.over = grant, ends, over
        self.after: dict[int, Term] = {}
        """What was decided next, under the key 0: the first to say it is the only one."""


def _never(_: Term) -> bool:
    return False


class Node:
    """A claim's node, from the answer to its create to its end. It has one life: a claim that
    lines up anew has another."""

    __slots__ = ("moving", "name", "path", "preview", "session", "term", "token", "version")

    def __init__(self, path: str, session: int, token: int) -> None:
        self.path, self.name = path, path[path.rindex("/") + 1 :]
        self.session, self.token = session, token
        self.version = 0
        """Of the node's data, as far as known."""
        self.moving = 0
        """The key of the session that an unanswered request moves it to."""
        self.preview: Preview | None = None
        self.term = Term()
        """The last one, or one of the last: ``last`` is sure."""

    def last(self) -> Term:
        term = self.term
        while term.after:
            term = term.after[0]
        return term

    @property
    def over(self) -> bool:
        return self.last().over

    @property
    def grant(self) -> Grant | None:
        """Whom it has let in."""
        return self.last().grant

    def hold(self, grant: Grant, ends: float) -> bool:
        """Lets its owner in, or keeps it there until then; false if it is over."""
        return self._follow(Term(grant, ends), _never)

    def end(self, unless: Callable[[Term], bool] = _never) -> bool:
        """Nobody is let in by it from here on. True for one caller: the one to delete it."""
        return self._follow(Term(over=True), unless)

    def _follow(self, term: Term, unless: Callable[[Term], bool]) -> bool:
        while not (last := self.last()).over and not unless(last):
            if last.after.setdefault(0, term) is term:
                self.term = term
                return True
        return False


class Attendance:
    """Somebody who is there for a claim: one attempt, or one wait."""

    __slots__ = ("left",)

    def __init__(self, left: float | None = None) -> None:
        self.left = left
        """Since when it ought to have come back: it ended, or was called. ``None`` before that."""


class Entry:
    """One claim of this process, from its first attempt until it is given back."""

    __slots__ = (
        "asked",
        "attendance",
        "behind",
        "claim",
        "key",
        "maker",
        "node",
        "past",
        "refreshed",
        "signal",
        "unsure",
    )

    def __init__(self, claim: Claim, key: int, now: float) -> None:
        self.claim, self.key = claim, key
        self.node: Node | None = None
        """Its last one, which may be over."""
        self.past: frozenset[str] = frozenset()
        """The paths of those before it: who has ended them may still be about to delete them."""
        self.asked = False
        """Whether a create was sent and not answered yet: there may or may not be a node."""
        self.unsure = False
        """Whether a create was ever not answered: it may still make a node."""
        self.maker: dict[int, object] = {}
        """Who makes its node, or takes its slots, under the key 0: one at a time."""
        self.refreshed = now
        self.attendance = Attendance(now)
        """The owner's own last one. Whoever asks on its behalf is not there for it."""
        self.behind = 0
        self.signal: Wake | None = None
        """What a wait for it waits for."""

    def kept(self, term: Term, now: float, *, its_turn: bool = False) -> bool:
        """Whether somebody keeps its node, and comes for it once it is its turn."""
        if term.grant is not None:
            return now <= term.ends
        return now <= self.refreshed + STALE_SECONDS and not (its_turn and self.unattended(now))

    def unattended(self, now: float) -> bool:
        """Whether nobody would come if it were its turn."""
        left = self.attendance.left
        return left is not None and now > left + GRACE_SECONDS
