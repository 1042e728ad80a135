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
    from holdfast.stores.zookeeper.client.completion import WakeSignal
    from holdfast.stores.zookeeper.wakeups import PrefetchedListing

__all__ = ["ClaimNode", "NodeState", "Presence", "ZooKeeperEntry"]


class NodeState:
    """What was decided over a node: for which hold it stands and until when, or that it is over."""

    __slots__ = ("ended", "ends", "grant", "next")

    def __init__(
        self, grant: Grant | None = None, ends: float = math.inf, *, ended: bool = False
    ) -> None:
        self.grant, self.ends, self.ended = grant, ends, ended
        self.next: dict[int, NodeState] = {}
        """What was decided next, under the key 0: the first to say it is the only one."""


def _never(_: NodeState) -> bool:
    return False


class ClaimNode:
    """A claim's node, from the answer to its create to its end. It has one life: a claim that
    lines up anew has another."""

    __slots__ = ("moving_to", "name", "path", "prefetched", "session", "state", "token", "version")

    def __init__(self, path: str, session: int, token: int) -> None:
        self.path, self.name = path, path[path.rindex("/") + 1 :]
        self.session, self.token = session, token
        self.version = 0
        """Of the node's data, as far as known."""
        self.moving_to = 0
        """The key of the session that an unanswered request moves it to."""
        self.prefetched: PrefetchedListing | None = None
        self.state = NodeState()
        """The last one, or one of the last: ``last`` is sure."""

    def current(self) -> NodeState:
        state = self.state
        while state.next:
            state = state.next[0]
        return state

    @property
    def ended(self) -> bool:
        return self.current().ended

    @property
    def grant(self) -> Grant | None:
        """Whom it has let in."""
        return self.current().grant

    def hold(self, grant: Grant, ends: float) -> bool:
        """Lets its owner in, or keeps it there until then; false if it is over."""
        return self._transition(NodeState(grant, ends), _never)

    def end(self, unless: Callable[[NodeState], bool] = _never) -> bool:
        """Nobody is let in by it from here on. True for one caller: the one to delete it."""
        return self._transition(NodeState(ended=True), unless)

    def _transition(self, state: NodeState, unless: Callable[[NodeState], bool]) -> bool:
        while not (current := self.current()).ended and not unless(current):
            if current.next.setdefault(0, state) is state:
                self.state = state
                return True
        return False


class Presence:
    """Somebody who is there for a claim: one attempt, or one wait."""

    __slots__ = ("left",)

    def __init__(self, left: float | None = None) -> None:
        self.left = left
        """Since when it ought to have come back: it ended, or was called. ``None`` before that."""


class ZooKeeperEntry:
    """One claim of this process, from its first attempt until it is given back."""

    __slots__ = (
        "behind",
        "claim",
        "create_pending",
        "create_unanswered",
        "in_progress",
        "key",
        "node",
        "past_paths",
        "presence",
        "refreshed",
        "wake_signal",
    )

    def __init__(self, claim: Claim, key: int, now: float) -> None:
        self.claim, self.key = claim, key
        self.node: ClaimNode | None = None
        """Its last one, which may be over."""
        self.past_paths: frozenset[str] = frozenset()
        """The paths of those before it: who has ended them may still be about to delete them."""
        self.create_pending = False
        """Whether a create was sent and not answered yet: there may or may not be a node."""
        self.create_unanswered = False
        """Whether a create was ever not answered: it may still make a node."""
        self.in_progress: dict[int, object] = {}
        """Who makes its node, or takes its slots, under the key 0: one at a time."""
        self.refreshed = now
        self.presence = Presence(now)
        """The owner's own last one. Whoever asks on its behalf is not there for it."""
        self.behind = 0
        self.wake_signal: WakeSignal | None = None
        """What a wait for it waits for."""

    def is_kept(self, state: NodeState, now: float, *, admitted: bool = False) -> bool:
        """Whether somebody keeps its node, and comes for it once it is its turn."""
        if state.grant is not None:
            return now <= state.ends
        return now <= self.refreshed + STALE_SECONDS and not (admitted and self.is_absent(now))

    def is_absent(self, now: float) -> bool:
        """Whether nobody would come if it were its turn."""
        left = self.presence.left
        return left is not None and now > left + GRACE_SECONDS
