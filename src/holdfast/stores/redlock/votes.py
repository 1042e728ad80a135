"""Counting the nodes' votes: what a round of answers means. Pure, and all of the client's part of
the token protocol: the model check runs this very code.

A claim is granted when a quorum of nodes holds it under one token T and none of their counters is
below T. On any two such quorums some node is in both, so tokens differ and grow in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from holdfast.claim import Busy, Claim
from holdfast.core import admit
from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable
from holdfast.stores.redis.connection import Refused
from holdfast.stores.redis.replies import clock_time, damage, refusal

__all__ = [
    "SPLIT_SECONDS",
    "Ballot",
    "Verdict",
    "busy",
    "check_round",
    "count",
    "enough_acks",
    "enough_ends",
    "enough_grants",
    "heard",
    "rearranged",
    "wait_for_all",
]

YES, NO = 1, 0
YOUNG_MILLISECONDS = 100
SPLIT_SECONDS = (0.0005, 0.01)
"""When to come again after nobody won: each at a moment of its own."""
YOUNG_SECONDS = (0.02, 0.08)
"""When to look again at a hold so young that it may not last."""


class Verdict(NamedTuple):
    """What a round of votes on a claim came to."""

    token: int | None
    """The token, once a quorum has it."""
    slots: str
    raise_to: int | None
    """The token to raise the others to, where a quorum granted but under several tokens."""
    raised: frozenset[int]
    """The nodes that have it already."""


_SHAPES: dict[int | bytes, tuple[type, ...]] = {
    YES: (int, bytes, bytes),
    NO: (int, int, bytes, bytes, int),
    b"limit": (bytes,),
    b"barred": (int, int, int),
    b"clock": (int,),
    b"gone": (),
    b"incompatible": (bytes,),
}
"""What stands behind each kind of vote: see ``grant.lua``."""


def _vote(answer: Any) -> list[Any] | None:
    """A node's vote; ``None`` if it gave none, or something else than one."""
    vote = answer[0] if type(answer) is list and answer else None
    if type(vote) is not list or not vote or type(vote[0]) not in (int, bytes):
        return None
    shape = _SHAPES.get(vote[0])
    return vote if shape == tuple(type(word) for word in vote[1:]) else None


class Ballot:
    """The votes of one round. A vote is what ``grant.lua`` answers; others are none."""

    def __init__(self, answers: Sequence[Any], quorum: int, sent: int = 0) -> None:
        self.total, self.quorum, self.sent = len(answers), quorum, sent
        self.granted: dict[int, tuple[int, str]] = {}
        self.refused: dict[int, Any] = {}
        self.maps: dict[int, bytes] = {}
        """Which slots each granting node has free, or gave to us."""
        for index, answer in enumerate(answers):
            vote = _vote(answer)
            if vote is None:
                continue
            if vote[0] == YES:
                self.granted[index] = vote[1], vote[2].decode()
                self.maps[index] = vote[3]
            else:
                self.refused[index] = vote

    @property
    def answered(self) -> int:
        return len(self.granted) + len(self.refused)

    def verdict(self) -> Verdict | None:
        """The decision, or ``None`` where no quorum granted the same."""
        alike = set(self.granted.values())
        if len(alike) == 1 and len(self.granted) >= self.quorum:
            ((token, slots),) = alike  # the usual case
            return Verdict(token, slots, None, frozenset())
        by_slots = Counter(slots for _, slots in self.granted.values())
        for slots, votes in by_slots.items():
            if votes < self.quorum:
                continue
            tokens = {i: token for i, (token, its) in self.granted.items() if its == slots}
            for token, times in Counter(tokens.values()).items():
                if times >= self.quorum:
                    return Verdict(token, slots, None, frozenset())
            highest = max(tokens.values())
            raised = frozenset(i for i, token in tokens.items() if token == highest)
            return Verdict(None, slots, highest, raised)
        return None

    def unless_refused(self) -> list[int]:
        """The nodes that granted, or may have."""
        return [index for index in range(self.total) if index not in self.refused]

    def kinds(self, kind: bytes) -> list[Any]:
        """The refusals of one kind: ``limit``, ``barred``, ``gone`` …"""
        return [vote for vote in self.refused.values() if vote[0] == kind]

    def split(self) -> bool:
        """Whether nobody can be seen to have a quorum: several contend, and none has won."""
        held = Counter(vote[3] for vote in self.kinds_of_no() if vote[3])
        unseen = self.total - self.answered
        most = max(held.values(), default=0)
        return bool(held) and most + unseen < self.quorum

    def holder(self) -> bytes:
        """Who is seen to hold a majority alone; empty where nobody is."""
        held = Counter(vote[3] for vote in self.kinds_of_no())
        for holder, votes in held.items():
            if votes >= self.quorum:
                return bytes(holder)
        return b""

    def young(self) -> bool:
        """Whether what is in the way may be an attempt that comes to nothing, and of which nobody
        would tell."""
        return any(vote[5] < YOUNG_MILLISECONDS for vote in self.kinds_of_no())

    def kinds_of_no(self) -> list[Any]:
        return [vote for vote in self.refused.values() if vote[0] == NO]

    def counter(self) -> int:
        """The highest counter that any node told."""
        seen = [token for token, _ in self.granted.values()]
        seen += [vote[1] for vote in self.refused.values() if vote[0] in (NO, b"barred")]
        return max(seen, default=0)


def heard(answers: Sequence[Any]) -> int:
    """How many nodes answered, and not with errors alone: those decide nothing."""
    return sum(
        type(answer) is list and not all(isinstance(reply, Refused) for reply in answer)
        for answer in answers
    )


def ready_after(ballot: Ballot) -> float | None:
    """In how many seconds a quorum may be had by time alone."""
    times = [0.0] * len(ballot.granted)
    for vote in ballot.refused.values():
        if vote[0] in (NO, b"barred"):
            times.append(vote[2] / 1000)
    times.sort()
    return times[ballot.quorum - 1] if len(times) >= ballot.quorum else None


def enough_grants(quorum: int, *, slots: bool) -> Callable[[list[Any]], bool]:
    """When a round of votes need not go on: granted by a quorum, or impossible."""

    def enough(answers: list[Any]) -> bool:
        yes = open_ = 0
        for answer in answers:
            if answer is None:
                open_ += 1
            elif (vote := _vote(answer)) is not None and vote[0] == YES:
                yes += 1
        if yes < quorum:
            # Whether it is impossible or the store is unavailable takes a quorum of answers too.
            return yes + open_ < quorum and heard(answers) >= quorum
        return not slots or Ballot(answers, quorum).verdict() is not None

    return enough


def count(answers: Sequence[Any], value: int = YES) -> int:
    """How many nodes answered so."""
    return sum(type(answer) is list and answer[0] == value for answer in answers)


def enough_acks(quorum: int, already: int = 0) -> Callable[[list[Any]], bool]:
    """When enough have acknowledged, or too few can."""

    def enough(answers: list[Any]) -> bool:
        yes = already
        open_ = 0
        for answer in answers:
            if answer is None:
                open_ += 1
            elif type(answer) is list and type(answer[0]) is int and answer[0] & 1:
                yes += 1
        return yes >= quorum or yes + open_ < quorum

    return enough


def enough_ends(quorum: int) -> Callable[[list[Any]], bool]:
    """When enough have ended a hold that was theirs; or, if too few can, when a quorum has told."""
    ended = enough_acks(quorum)

    def enough(answers: list[Any]) -> bool:
        return ended(answers) and heard(answers) >= quorum

    return enough


def wait_for_all(answers: Sequence[Any]) -> bool:
    """Nothing is enough: every node that is there is waited for."""
    return not answers


def check_round(answers: Sequence[Any], quorum: int, store: str, name: str) -> None:
    """Raises ``Incompatible`` if a node has what another version wrote, or if what is stored can't
    be read on so many that too few are left."""
    replies = [answer[0] for answer in answers if type(answer) is list and answer]
    for reply in replies:
        if type(reply) is list and reply[:1] == [b"incompatible"]:
            raise refusal(reply, store, name)
    for reply in replies:
        if damage(reply) and heard(answers) < quorum:
            raise refusal(reply, store, name)


def busy(ballot: Ballot, claim: Claim, store: str, runtime: Runtime) -> Busy:
    """The answer to a claim that no quorum granted; raises where nothing was changed."""
    blocking = ballot.total - ballot.quorum
    check_round([[vote] for vote in ballot.refused.values()], 0, store, claim.name)
    if ballot.kinds(b"gone"):
        raise BackendUnavailable(
            f"a request for {claim.name!r} reached {store} after it had been given up"
        )
    if len(ballot.kinds(b"clock")) > blocking:
        raise BackendUnavailable(
            f"{store} refuses {claim.name!r}: this machine's clock is more than a day ahead"
        )
    limits = [int(vote[1]) for vote in ballot.kinds(b"limit") if vote[1].isdigit()]
    if len(limits) > blocking:
        limit = max(set(limits), key=limits.count)
        admit.check_limit(claim, limit, slots=limit > 0, store=store)
    if limits or ballot.split():
        return Busy(0, runtime.between(*SPLIT_SECONDS))
    if ballot.young():
        return Busy(0, runtime.between(*YOUNG_SECONDS))
    after = ready_after(ballot)
    reason = _quarantine(ballot, store)
    retry = runtime.between(*SPLIT_SECONDS) if after is None else after * runtime.between(1, 1.02)
    return Busy(0, max(retry, 0.002), None, reason)


def _quarantine(ballot: Ballot, store: str) -> str:
    barred = ballot.kinds(b"barred")
    if not barred or len(barred) + len(ballot.granted) < ballot.quorum:
        return ""
    until = clock_time(max(vote[3] for vote in barred))
    return (
        f"{len(barred)} of {ballot.total} nodes of {store} grant nothing before {until}: they were "
        "restarted, emptied, demoted or replaced and may have lost holds (loss_protection; "
        "`holdfast init` marks new ones as new)"
    )


def rearranged(ballot: Ballot, claim: Claim) -> str:
    """Which slots to ask every node for, where the nodes chose different ones; empty if there are
    not as many as the claim needs."""
    free: dict[int, int] = {}
    for vote in ballot.kinds_of_no():
        _add(free, vote[4])
    for index in ballot.granted:
        _add(free, ballot.maps[index])
    unseen = ballot.total - ballot.answered
    possible = [slot for slot, votes in free.items() if votes + unseen >= ballot.quorum]
    if len(possible) < claim.weight or not ballot.granted:
        return ""
    mine = {int(s) for _, slots in ballot.granted.values() for s in slots.split(",")}
    best = sorted(possible, key=lambda slot: (-free[slot], slot not in mine, slot))
    return ",".join(str(slot) for slot in sorted(best[: claim.weight]))


def _add(free: dict[int, int], marks: bytes) -> None:
    for slot, mark in enumerate(marks.decode()):
        if mark == "1":
            free[slot] = free.get(slot, 0) + 1
