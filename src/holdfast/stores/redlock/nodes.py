"""What both broadcasts share: the health of the nodes, and the state of one round of requests.

A round goes to every node at once and ends when its votes decide it, not when the slowest node
has answered. Later replies are read and discarded by the next use of their connection. A node that
does not answer, or can't be reached, is left out until a connection in the background succeeds.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from holdfast.core.backoff import RETRY_JITTER
from holdfast.errors import BackendUnavailable, GuaranteeNotMet
from holdfast.io.clock import now
from holdfast.io.resp import RedisRefused, pack
from holdfast.stores.redis.replies import is_final
from holdfast.stores.redis.url import NodeAddress
from holdfast.stores.redlock.votes import answered_count

__all__ = [
    "CONNECT_SECONDS",
    "INFO",
    "UNRESPONSIVE_SECONDS",
    "Nodes",
    "RedlockNode",
    "Round",
    "RoundRequest",
]

STRAGGLER_SECONDS = 0.1
"""How long a round waits for the other nodes after a quorum has answered without a decision."""
OPERATOR_STRAGGLER_SECONDS = 2.0
"""The same for what an operator asks of every node, where no decision ends the round: a node that
answers slowly must not be reported as one that does not answer."""
UNRESPONSIVE_SECONDS = 1.0
"""A node with a reply pending for longer counts as down, and its connection is closed."""
CONNECT_SECONDS = 1.0
"""The longest wait for a connection to a node if there is a majority without that node."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0
"""The back-off between two attempts to connect to a node that is down."""
MOST_MISSED = 1024
"""How many releases are kept for a node that is left out; of more, the oldest are dropped."""
INFO = pack("INFO")


class RedlockNode:
    """One master and its health; shared by all backends of a client."""

    __slots__ = (
        "address",
        "cause",
        "down",
        "failures",
        "final",
        "fit",
        "missed",
        "retry_at",
        "reviving",
        "run",
    )

    def __init__(self, address: NodeAddress) -> None:
        self.address = address
        self.down = self.reviving = self.final = False
        self.fit = False
        """Whether the node has ever passed ``check_info``. A node that has not raises the error to
        the caller; a node that has and no longer passes counts as down."""
        self.cause = ""
        self.failures = 0
        self.retry_at = 0.0
        self.run = ""
        self.missed: dict[bytes, None] = {}
        """Releases that this node has not answered, and has perhaps not run. It may have run the
        grant, or run it later: of what was sent on a connection that is given up, a part may be
        lost."""

    def miss(self, command: bytes) -> None:
        """Keep a release for the next connection to this node."""
        while len(self.missed) >= MOST_MISSED:
            with suppress(RuntimeError, StopIteration):  # another thread changes it, too
                self.missed.pop(next(iter(self.missed)), None)
        self.missed[command] = None

    def caught_up(self, commands: Sequence[bytes]) -> None:
        """The node has answered these releases."""
        for command in commands:
            self.missed.pop(command, None)

    def failed(self, cause: object) -> None:
        """Leave the node out until a later connection succeeds."""
        self.down, self.cause = True, str(cause)
        self.final = isinstance(cause, BackendUnavailable) and cause.final
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(self.failures, 10))
        self.failures += 1
        self.retry_at = now() + pause * random.uniform(*RETRY_JITTER)

    def worked(self) -> None:
        """Use the node again: a connection has succeeded."""
        self.down, self.failures, self.cause = False, 0, ""


class Nodes:
    """All nodes of a store; shared by all backends of a client."""

    def __init__(
        self,
        addresses: Sequence[NodeAddress],
        *,
        display: str,
        allow_eviction: bool,
        prepare: Sequence[bytes] = (),
    ) -> None:
        self.members = [RedlockNode(address) for address in addresses]
        self.quorum = len(addresses) // 2 + 1
        self.display, self._allow_eviction = display, allow_eviction
        self.greeting = (INFO, *prepare)
        """Commands for every new connection; ``check_info`` reads the reply to the first."""
        self.renew_locks()

    def renew_locks(self) -> None:
        """Create the locks: at the start, and in a forked child, where a lock that another thread
        of the parent held would never be released."""
        # ``with`` takes the mutex, not the condition: the condition's ``__enter__`` is Python code,
        # and an interrupt in there leaves it locked for ever.
        self.mutex = threading.RLock()
        self.tried = threading.Condition(self.mutex)
        """Notified when any backend of the client has tried to connect to a node that was down."""

    def spare(self, node: RedlockNode) -> bool:
        """Whether there is a majority without this node, so that no call has to wait for it."""
        others = sum(not other.down for other in self.members if other is not node)
        return others >= self.quorum

    def up(self) -> int:
        """Count the nodes that are not down."""
        return sum(not node.down for node in self.members)

    def missed(self, request: RoundRequest, index: int) -> None:
        """Keep a request for a node that has perhaps not run it, if the node must run it."""
        if index in request.keep_for:
            self.members[index].miss(request.packed)

    def missed_by(self, round_: Round) -> None:
        """Keep the request of a round for the nodes that it was not sent to, or that failed."""
        for index, answer in enumerate(round_.answers):
            if type(answer) is not list and index not in round_.waiting:
                self.missed(round_.request, index)

    def check_info(self, node: RedlockNode, reply: Any) -> None:
        """Check the reply to INFO. Raises ``GuaranteeNotMet`` if the node may not vote: a replica,
        a server that evicts keys, or the same server as another node."""
        if not isinstance(reply, bytes):
            if isinstance(reply, RedisRefused) and reply.code == "NOPERM":
                node.fit = True
                return
            why = f"redis at {node.address} refuses INFO: {reply}"
            raise BackendUnavailable(why, final=is_final(reply))
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
        self._check_distinct(node, info.get("run_id", ""))
        node.fit = True

    def _check_distinct(self, node: RedlockNode, run: str) -> None:
        node.run = ""  # if two addresses are one server, the other address may vote
        for other in self.members:
            if other is not node and run and other.run == run:
                raise GuaranteeNotMet(
                    f"{node.address} and {other.address} are the same server: "
                    f"{self.display} needs independent masters"
                )
        node.run = run

    def unavailable(self, answers: Sequence[Any]) -> BackendUnavailable:
        """Return the error for a round that too few nodes answered, with the cause per node. It is
        final if so many nodes refuse for good that the others are no majority."""
        causes = []
        final = 0
        for node, answer in zip(self.members, answers, strict=True):
            final += _refuses_for_good(node, answer)
            if isinstance(answer, Exception):
                known = str(node.address) in str(answer)
                causes.append(str(answer) if known else f"{node.address}: {answer}")
            elif type(answer) is list and isinstance(answer[0], RedisRefused):
                causes.append(f"{node.address} refuses: {answer[0]}")
            elif answer is None:
                causes.append(node.cause or f"{node.address} did not answer in time")
        total = len(self.members)
        return BackendUnavailable(
            f"{self.display} needs {self.quorum} of {total} nodes: {'; '.join(causes)}",
            final=total - final < self.quorum,
        )


def _refuses_for_good(node: RedlockNode, answer: Any) -> bool:
    if isinstance(answer, BackendUnavailable):
        return answer.final
    if type(answer) is list:
        return is_final(answer[0])
    return answer is None and node.down and node.final


class RoundRequest:
    """Commands for every node (or ``only`` some), and a test whether their answers are enough.

    An answer is the list of a node's replies, an exception, or ``None`` while there is none.
    ``in_full`` returns a command with the text of its script, for a node that does not know it.
    """

    __slots__ = (
        "commands",
        "enough",
        "follow",
        "in_full",
        "keep_for",
        "only",
        "packed",
        "straggler",
    )

    def __init__(
        self,
        commands: Sequence[bytes],
        in_full: Callable[[int], bytes],
        enough: Callable[[list[Any]], bool],
        only: Sequence[int] | None = None,
        follow: Callable[[list[Any]], tuple[bytes, Sequence[int]] | None] | None = None,
        keep_for: Collection[int] = (),
        straggler: float = STRAGGLER_SECONDS,
    ) -> None:
        self.commands, self.in_full, self.enough, self.only = commands, in_full, enough, only
        self.follow = follow
        """Called with the answers at the end of the round. Returns a command and the nodes that get
        it on the same connections, in order after the request; its replies are not waited for."""
        self.keep_for = keep_for
        """The nodes that must run the request, if not now, then later: those that do not answer it
        get it with their next connection."""
        self.straggler = straggler
        """How long the round waits for the other nodes after a quorum has answered."""
        self.packed = commands[0] if len(commands) == 1 else b"".join(commands)


class Round:
    """One request in progress, and the replies so far."""

    __slots__ = ("amended", "answers", "got", "over", "request", "resent", "slow", "waiting")

    def __init__(self, request: RoundRequest, total: int) -> None:
        self.request = request
        self.answers: list[Any] = [None] * total
        self.got: list[list[Any]] = [[] for _ in range(total)]
        self.waiting: set[int] = set()
        self.amended: dict[int, list[int]] = {}
        self.resent: set[int] = set()
        self.over = False
        """Whether the call has returned: later replies are discarded."""
        self.slow: set[int] = set()
        """Nodes with replies to an earlier round pending: this round does not wait for them."""

    def take(self, index: int, reply: Any) -> bytes | None:
        """Store a reply. Returns the commands to send again, with their text, if the node did not
        know a script; else ``None``."""
        got = self.got[index]
        got.append(reply)
        amended = self.amended.get(index)
        if amended is None:
            if len(got) < len(self.request.commands):
                return None
            unknown = [
                at for at, r in enumerate(got) if type(r) is RedisRefused and r.code == "NOSCRIPT"
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

    def pending_replies(self, index: int) -> int:
        """Count the replies of a node that have not been read."""
        expected = len(self.request.commands) + len(self.amended.get(index, ()))
        return expected - len(self.got[index])

    def restart(self, index: int) -> None:
        """Discard a node's replies: the request is sent again on another connection."""
        self.resent.add(index)
        self.got[index] = []
        self.amended.pop(index, None)

    def failed(self, index: int, error: Exception) -> None:
        self.answers[index] = error
        self.waiting.discard(index)

    def reached(self) -> list[int]:
        """Return the nodes that may have got the request."""
        return [at for at, a in enumerate(self.answers) if a is not None or at in self.waiting]

    def decided(self) -> bool:
        return not self.waiting or self.request.enough(self.answers)

    def answered_count(self) -> int:
        return answered_count(self.answers)

    def until(self, deadline: float, quorum: int) -> float:
        """Return until when the round waits for the missing replies."""
        if self.answered_count() < quorum:
            return deadline
        if self.waiting <= self.slow:
            return 0.0
        return min(deadline, now() + self.request.straggler)
