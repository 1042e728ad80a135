"""One claim of this process, its node in the queue, and the state of that node.

Several threads change the state of a node: its owner's thread and a thread that releases the lock
in its favour grant it, the renewer renews it, and the thread of the heartbeats ends it if it is not
kept or its owner is absent. The thread that ends a node deletes it. From then on no thread may
grant it, even if that thread saw the claim admitted a moment before.

So a node's state is a linked list that is extended by an atomic ``dict.setdefault``: of two
concurrent transitions one wins, and the other one decides again by the new state. It is lock-free
because a signal handler may interrupt its own thread at any line, and would wait forever for a
mutex that this thread holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.claim import Busy, Claim, Grant
from holdfast.core.contract import GRACE_SECONDS, STALE_SECONDS

if TYPE_CHECKING:
    from holdfast.stores.zookeeper.wakeups import PrefetchedListing, WakeSignal

__all__ = ["ClaimNode", "NodeState", "Presence", "ZooKeeperEntry"]


class NodeState:
    """One state of a node: waiting, granted (until ``ends``), or ended."""

    __slots__ = ("ended", "ends", "grant", "next")

    def __init__(
        self, grant: Grant | None = None, ends: float = math.inf, *, ended: bool = False
    ) -> None:
        self.grant, self.ends, self.ended = grant, ends, ended
        self.next: dict[int, NodeState] = {}
        """The next state, under the key 0: the first ``setdefault`` wins."""


def _never(_: NodeState) -> bool:
    return False


class ClaimNode:
    """A claim's node, from the reply to its create until it is deleted. A claim that joins the
    queue again has another node."""

    __slots__ = (
        "busy",
        "moving_to",
        "name",
        "path",
        "prefetched",
        "session",
        "state",
        "token",
        "version",
    )

    def __init__(self, path: str, session: int, token: int) -> None:
        self.path, self.name = path, path[path.rindex("/") + 1 :]
        self.session, self.token = session, token
        self.version = 0
        """The version of the node's data, as far as known."""
        self.moving_to = 0
        """The key of the session that an unanswered request moves the node to; else 0."""
        self.prefetched: PrefetchedListing | None = None
        self.busy: Busy | None = None
        """The last answer by a listing, which names the node to wait for. ``None`` before that."""
        self.state = NodeState()
        """The current state or an earlier one: a hint from where ``current`` searches."""

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
        """The current grant; ``None`` while the claim waits, and after the node's end."""
        return self.current().grant

    def hold(self, grant: Grant, ends: float) -> bool:
        """Grants or renews the hold until ``ends``; false if the node has ended."""
        return self._transition(NodeState(grant, ends), _never)

    def end(self, unless: Callable[[NodeState], bool] = _never) -> bool:
        """Ends the node: it can't be granted from here on. True for the one caller that ended it,
        which must delete it; false if it has ended already, or ``unless`` holds for its state."""
        return self._transition(NodeState(ended=True), unless)

    def _transition(self, state: NodeState, unless: Callable[[NodeState], bool]) -> bool:
        while not (current := self.current()).ended and not unless(current):
            if current.next.setdefault(0, state) is state:
                self.state = state
                return True
        return False


class Presence:
    """The presence of a claim's owner during one attempt or one wait."""

    __slots__ = ("left",)

    def __init__(self, left: float | None = None) -> None:
        self.left = left
        """When the attempt or wait ended, or was woken: from then on the owner must act within its
        grace period. ``None`` before that."""


class ZooKeeperEntry:
    """One claim of this process, from its first attempt until it is released."""

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
        """The claim's last node, which may have ended."""
        self.past_paths: frozenset[str] = frozenset()
        """The paths of earlier nodes, which may not be deleted yet."""
        self.create_pending = False
        """Whether the last create has no reply yet: its node may or may not exist."""
        self.create_unanswered = False
        """Whether the reply to any create was lost: it may still make a node."""
        self.in_progress: dict[int, object] = {}
        """The attempt that creates the node or takes slots, under the key 0: one at a time."""
        self.refreshed = now
        self.presence = Presence(now)
        """The owner's last presence. An exchange that attempts on its behalf does not count."""
        self.behind = 0
        """How many claims wait behind this one in this process, as last written to the node."""
        self.wake_signal: WakeSignal | None = None
        """Ends the owner's wait."""

    def is_kept(self, state: NodeState, now: float, *, admitted: bool = False) -> bool:
        """Whether the node must stay: it is renewed or refreshed and, if the queue admits it
        (``admitted``), its owner is present."""
        if state.grant is not None:
            return now <= state.ends
        return now <= self.refreshed + STALE_SECONDS and not (admitted and self.is_absent(now))

    def is_absent(self, now: float) -> bool:
        """Whether the owner has not acted within its grace period."""
        left = self.presence.left
        return left is not None and now > left + GRACE_SECONDS
