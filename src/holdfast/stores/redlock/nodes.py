"""What both Redlock wires share: the health of the nodes, and one round of asking them all.

A round goes to every node at once and ends when its votes decide it, not when the slowest node
has answered. Replies that come later are read and dropped by the next use of their connection. A
node that does not answer, or can't be reached, is left out until somebody has reached it again in
the background.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import BackendUnavailable, GuaranteeNotMet
from holdfast.io.clock import now
from holdfast.stores.redis.connection import Address, Refused, pack
from holdfast.stores.redlock.votes import heard

__all__ = ["HUNG_SECONDS", "PING", "Fleet", "Node", "Request", "Round"]

STRAGGLER_SECONDS = 0.1
"""How much longer the others may take once a quorum has answered and nothing is decided."""
HUNG_SECONDS = 1.0
"""A node that owes an answer for so long is taken for hung, its connection for lost."""
CONNECT_SECONDS = 1.0
"""How long somebody waits for a connection where there is a majority without it."""
LONGEST_PAUSE_SECONDS = 1.0
PING = pack("INFO")


class Node:
    """One master, and what is known of its health; shared by all backends of a client."""

    __slots__ = ("address", "cause", "down", "failures", "fit", "retry_at", "reviving", "run")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.down = self.reviving = False
        self.fit = False
        """Whether it was found fit to vote once. If it is not to begin with, whoever asks is told;
        if it is no longer, it counts as down: the others go on without."""
        self.cause = ""
        self.failures = 0
        self.retry_at = 0.0
        self.run = ""

    def failed(self, cause: object) -> None:
        """It is left out from now on, until it was reached again."""
        self.down, self.cause = True, str(cause)
        pause = min(LONGEST_PAUSE_SECONDS, 0.05 * 2 ** min(self.failures, 10))
        self.failures += 1
        self.retry_at = now() + pause * random.uniform(0.5, 1.0)

    def worked(self) -> None:
        self.down, self.failures, self.cause = False, 0, ""


class Fleet:
    """All nodes of a store, as all backends of a client know them."""

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        display: str,
        allow_eviction: bool,
        prepare: Sequence[bytes] = (),
    ) -> None:
        self.nodes = [Node(address) for address in addresses]
        self.quorum = len(addresses) // 2 + 1
        self.display, self._allow_eviction = display, allow_eviction
        self.greeting = (PING, *prepare)
        """What every new connection is sent; the reply to the first is judged."""
        self.renew_locks()

    def renew_locks(self) -> None:
        """At first, and in a forked child, where its parent's may be locked for ever."""
        # Entered directly: the condition's own way in is Python code, and an interrupt in there
        # leaves it locked for ever.
        self.mutex = threading.RLock()
        self.tried = threading.Condition(self.mutex)
        """Told when a node that was down has been tried, whichever backend of the client did so."""

    def spare(self, node: Node) -> bool:
        """Whether there is a majority without it: then nobody waits long for it."""
        others = sum(not other.down for other in self.nodes if other is not node)
        return others >= self.quorum

    def up(self) -> int:
        return sum(not node.down for node in self.nodes)

    def judge(self, node: Node, reply: Any) -> None:
        """Looks at what a new connection says of its server; raises where it can't be a vote."""
        if not isinstance(reply, bytes):
            if isinstance(reply, Refused) and reply.code == "NOPERM":
                node.fit = True
                return
            raise BackendUnavailable(f"redis at {node.address} refuses INFO: {reply}")
        lines = reply.decode(errors="replace").splitlines()
        info = dict(line.split(":", 1) for line in lines if ":" in line)
        if info.get("role", "master") != "master":
            raise GuaranteeNotMet(
                f"redis at {node.address} is a replica: {self.display} needs independent masters"
            )
        policy = info.get("maxmemory_policy", "noeviction")
        evicts = policy != "noeviction" and info.get("maxmemory", "0") != "0"
        if evicts and not self._allow_eviction:
            raise GuaranteeNotMet(
                f"redis at {node.address} may evict locks: its maxmemory-policy is {policy!r}; "
                "use noeviction, or say ?allow_eviction=on"
            )
        self._tell_apart(node, info.get("run_id", ""))
        node.fit = True

    def _tell_apart(self, node: Node, run: str) -> None:
        node.run = ""  # of two that are the same, the other one may vote
        for other in self.nodes:
            if other is not node and run and other.run == run:
                raise GuaranteeNotMet(
                    f"{node.address} and {other.address} are the same server: "
                    f"{self.display} needs independent masters"
                )
        node.run = run

    def unavailable(self, answers: Sequence[Any]) -> BackendUnavailable:
        """The error for a round that too few nodes have answered."""
        causes = []
        for node, answer in zip(self.nodes, answers, strict=True):
            if isinstance(answer, Exception):
                causes.append(f"{node.address}: {answer}")
            elif type(answer) is list and isinstance(answer[0], Refused):
                causes.append(f"{node.address} refuses: {answer[0]}")
            elif answer is None:
                causes.append(node.cause or f"{node.address} did not answer in time")
        return BackendUnavailable(
            f"{self.display} needs {self.quorum} of {len(self.nodes)} nodes: {'; '.join(causes)}"
        )


class Request:
    """Commands for every node (or ``only`` some), and when their answers are enough.

    An answer is the list of a node's replies, or an exception, or ``None`` while there is none.
    """

    __slots__ = ("commands", "enough", "follow", "in_full", "only", "packed")

    def __init__(
        self,
        commands: Sequence[bytes],
        in_full: Callable[[int], bytes],
        enough: Callable[[list[Any]], bool],
        only: Sequence[int] | None = None,
        follow: Callable[[list[Any]], tuple[bytes, Sequence[int]] | None] | None = None,
    ) -> None:
        self.commands, self.in_full, self.enough, self.only = commands, in_full, enough, only
        self.follow = follow
        """What is sent to which nodes behind it, over the same connections, when it is over;
        nobody waits for the replies."""
        self.packed = commands[0] if len(commands) == 1 else b"".join(commands)


class Round:
    """One request on its way: what came back so far."""

    __slots__ = ("amended", "answers", "got", "over", "request", "resent", "slow", "waiting")

    def __init__(self, request: Request, total: int) -> None:
        self.request = request
        self.answers: list[Any] = [None] * total
        self.got: list[list[Any]] = [[] for _ in range(total)]
        self.waiting: set[int] = set()
        self.amended: dict[int, list[int]] = {}
        self.resent: set[int] = set()
        self.over = False
        """Whether nobody waits for the rest any more."""
        self.slow: set[int] = set()
        """Nodes that still owe an answer to an earlier round: nobody waits for these."""

    def take(self, index: int, reply: Any) -> bytes | None:
        """Notes a reply. Answers what to send again because the node did not know a script."""
        got = self.got[index]
        got.append(reply)
        amended = self.amended.get(index)
        if amended is None:
            if len(got) < len(self.request.commands):
                return None
            unknown = [
                at for at, r in enumerate(got) if type(r) is Refused and r.code == "NOSCRIPT"
            ]
            if unknown:
                self.amended[index] = unknown
                return b"".join(self.request.in_full(at) for at in unknown)
        elif len(got) < len(self.request.commands) + len(amended):
            return None
        else:
            fresh = got[len(self.request.commands) :]
            got = got[: len(self.request.commands)]
            for at, late in zip(amended, fresh, strict=True):
                got[at] = late
        self.answers[index] = got
        self.waiting.discard(index)
        return None

    def owed(self, index: int) -> int:
        """How many replies of a node are still to come."""
        expected = len(self.request.commands) + len(self.amended.get(index, ()))
        return expected - len(self.got[index])

    def again(self, index: int) -> None:
        """A node is asked once more, over another connection."""
        self.resent.add(index)
        self.got[index] = []
        self.amended.pop(index, None)

    def failed(self, index: int, error: Exception) -> None:
        self.answers[index] = error
        self.waiting.discard(index)

    def decided(self) -> bool:
        return not self.waiting or self.request.enough(self.answers)

    def answered(self) -> int:
        return heard(self.answers)

    def until(self, deadline: float, quorum: int) -> float:
        """Until when to wait for what is missing."""
        if self.answered() < quorum:
            return deadline
        if self.waiting <= self.slow:
            return 0.0
        return min(deadline, now() + STRAGGLER_SECONDS)
