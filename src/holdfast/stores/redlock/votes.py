"""What a round of votes means: a grant, a retry time or an error. Pure functions.

This is the client's whole part of the token protocol; the model check (``test_model``) runs this
code. A claim is granted when a quorum of nodes holds it under one token T and none of their
counters is below T. Any two quorums have a node in common, so tokens differ and grow in order.

An answer is the list of one node's replies, an exception, or ``None`` while there is none. A vote
is the reply of ``grant.lua``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from holdfast.claim import Busy, Claim
from holdfast.core import admit
from holdfast.core.backoff import EXPIRY_JITTER, SPLIT_VOTE_SECONDS, YOUNG_HOLD_SECONDS
from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable
from holdfast.io.resp import RedisRefused
from holdfast.stores.redis.replies import clock_time, damage, refusal

__all__ = [
    "Ballot",
    "Verdict",
    "acknowledged_count",
    "answered_count",
    "busy_answer",
    "check_round",
    "choose_slots",
    "enough_acks",
    "enough_ends",
    "enough_grants",
    "wait_for_all",
]

YES, NO = 1, 0
YOUNG_MILLISECONDS = 100
"""A younger hold may be the vote for an attempt that is about to fail."""
LEAST_RETRY_SECONDS = 0.002


class Verdict(NamedTuple):
    """The result of a round in which a quorum granted the claim."""

    token: int | None
    """The token, if a quorum has granted the same one."""
    slots: str
    raise_to: int | None
    """The highest token, if the quorum granted different ones: the others must be raised to it."""
    raised: frozenset[int]
    """The nodes that have ``raise_to`` already."""


_SHAPES: dict[int | bytes, tuple[type, ...]] = {
    YES: (int, bytes, bytes),
    NO: (int, int, bytes, bytes, int),
    b"limit": (bytes,),
    b"barred": (int, int, int),
    b"clock": (int,),
    b"gone": (),
    b"incompatible": (bytes,),
}
"""The types of the values after each kind of vote: see ``grant.lua``."""


def _vote(answer: Any) -> list[Any] | None:
    """Return the vote in a node's answer, or ``None`` if it holds no valid vote."""
    vote = answer[0] if type(answer) is list and answer else None
    if type(vote) is not list or not vote or type(vote[0]) not in (int, bytes):
        return None
    shape = _SHAPES.get(vote[0])
    return vote if shape == tuple(type(word) for word in vote[1:]) else None


class Ballot:
    """The votes of one round. Answers that are no valid vote do not count."""

    def __init__(self, answers: Sequence[Any], quorum: int, sent: int = 0) -> None:
        self.total, self.quorum, self.sent = len(answers), quorum, sent
        self.granted: dict[int, tuple[int, str]] = {}
        self.refused: dict[int, Any] = {}
        self.maps: dict[int, bytes] = {}
        """Per granting node, a map of its slots: 1 is free or granted to us."""
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
        """Return the decision, or ``None`` if no quorum granted the same slots."""
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

    def may_hold(self) -> list[int]:
        """Return the nodes that granted the claim, or may have granted it."""
        return [index for index in range(self.total) if index not in self.refused]

    def votes_of(self, kind: bytes) -> list[Any]:
        """Return the refusals of one kind: ``limit``, ``barred``, ``gone`` …"""
        return [vote for vote in self.refused.values() if vote[0] == kind]

    def split(self) -> bool:
        """Whether the vote is split: several contend, and none of them can have a quorum."""
        held = Counter(vote[3] for vote in self.busy_votes() if vote[3])
        unseen = self.total - self.answered
        most = max(held.values(), default=0)
        return bool(held) and most + unseen < self.quorum

    def holder(self) -> bytes:
        """Return the digest of the owner that holds a quorum exclusively; empty if none."""
        held = Counter(vote[3] for vote in self.busy_votes())
        for holder, votes in held.items():
            if votes >= self.quorum:
                return bytes(holder)
        return b""

    def young(self) -> bool:
        """Whether a hold in the way may belong to an attempt that fails. Its end would not be
        published."""
        return any(vote[5] < YOUNG_MILLISECONDS for vote in self.busy_votes())

    def busy_votes(self) -> list[Any]:
        return [vote for vote in self.refused.values() if vote[0] == NO]

    def counter(self) -> int:
        """Return the highest counter in any vote."""
        seen = [token for token, _ in self.granted.values()]
        seen += [vote[1] for vote in self.refused.values() if vote[0] in (NO, b"barred")]
        return max(seen, default=0)


def answered_count(answers: Sequence[Any]) -> int:
    """Count the nodes that answered. An answer of errors alone does not count."""
    return sum(
        type(answer) is list and not all(isinstance(reply, RedisRefused) for reply in answer)
        for answer in answers
    )


def ready_after(ballot: Ballot) -> float | None:
    """Return in how many seconds enough holds expire for a quorum; ``None`` if unknown."""
    times = [0.0] * len(ballot.granted)
    for vote in ballot.refused.values():
        if vote[0] in (NO, b"barred"):
            times.append(vote[2] / 1000)
    times.sort()
    return times[ballot.quorum - 1] if len(times) >= ballot.quorum else None


def enough_grants(quorum: int, *, slots: bool) -> Callable[[list[Any]], bool]:
    """Return a test whether a round of votes can end: a quorum granted, or can't grant."""

    def enough(answers: list[Any]) -> bool:
        yes = open_ = 0
        for answer in answers:
            if answer is None:
                open_ += 1
            elif (vote := _vote(answer)) is not None and vote[0] == YES:
                yes += 1
        if yes < quorum:
            # Telling "refused" from "unavailable" takes a quorum of answers too.
            return yes + open_ < quorum and answered_count(answers) >= quorum
        return not slots or Ballot(answers, quorum).verdict() is not None

    return enough


class Transfer:
    """The votes of one round on a take-over: see ``take_over.lua``."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.slots = "-"
        self.taken = self.behind = self.highest = 0
        """How many nodes have given the hold to the new owner; how many have a counter that is not
        below the proposed token; the highest of these."""
        for answer in answers:
            vote = answer[0] if type(answer) is list and answer else None
            match vote:
                case [1, bytes(slots)]:
                    self.taken, self.slots = self.taken + 1, slots.decode()
                case [2, int(counter)]:
                    self.behind, self.highest = self.behind + 1, max(self.highest, counter)


def enough_transfers(quorum: int) -> Callable[[list[Any]], bool]:
    """Return a test whether a quorum has given a hold to its new owner."""
    return lambda answers: Transfer(answers).taken >= quorum


def acknowledged_count(answers: Sequence[Any], value: int = YES) -> int:
    """Count the nodes whose reply is ``value``."""
    return sum(type(answer) is list and answer[0] == value for answer in answers)


def enough_acks(quorum: int, already: int = 0) -> Callable[[list[Any]], bool]:
    """Return a test whether a quorum has acknowledged, or no longer can."""

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
    """Return a test whether a quorum has ended a hold, or a quorum answered and too few can."""
    ended = enough_acks(quorum)

    def enough(answers: list[Any]) -> bool:
        return ended(answers) and answered_count(answers) >= quorum

    return enough


def wait_for_all(answers: Sequence[Any]) -> bool:
    """A test that lets no round end early: every reachable node is waited for."""
    return not answers


def check_round(answers: Sequence[Any], quorum: int, store: str, name: str) -> None:
    """Raise ``Incompatible`` if a node holds data of another protocol version, or if damaged data
    leaves fewer than a quorum of usable nodes."""
    replies = [answer[0] for answer in answers if type(answer) is list and answer]
    for reply in replies:
        if type(reply) is list and reply[:1] == [b"incompatible"]:
            raise refusal(reply, store, name)
    for reply in replies:
        if damage(reply) and answered_count(answers) < quorum:
            raise refusal(reply, store, name)


def busy_answer(ballot: Ballot, claim: Claim, store: str, runtime: Runtime) -> Busy:
    """Return the answer to a claim that no quorum granted. Raises if the nodes refuse the claim
    itself: another limit or protocol version, a wrong clock, or an abandoned claim."""
    blocking = ballot.total - ballot.quorum
    check_round([[vote] for vote in ballot.refused.values()], 0, store, claim.name)
    if ballot.votes_of(b"gone"):
        raise BackendUnavailable(
            f"a request for {claim.name!r} reached {store} after it was abandoned"
        )
    if len(ballot.votes_of(b"clock")) > blocking:
        raise BackendUnavailable(
            f"{store} refuses {claim.name!r}: this machine's clock is more than a day ahead"
        )
    limits = [int(vote[1]) for vote in ballot.votes_of(b"limit") if vote[1].isdigit()]
    if len(limits) > blocking:
        limit = max(set(limits), key=limits.count)
        admit.check_limit(claim, limit, slots=limit > 0, store=store)
    if limits or ballot.split():
        return Busy(0, runtime.between(*SPLIT_VOTE_SECONDS))
    if ballot.young():
        return Busy(0, runtime.between(*YOUNG_HOLD_SECONDS))
    after = ready_after(ballot)
    reason = _quarantine(ballot, store)
    if after is None:
        retry = runtime.between(*SPLIT_VOTE_SECONDS)
    else:
        retry = after * runtime.between(*EXPIRY_JITTER)
    return Busy(0, max(retry, LEAST_RETRY_SECONDS), None, reason)


def _quarantine(ballot: Ballot, store: str) -> str:
    """Return why nodes that may have lost data grant nothing; empty if others are in the way."""
    barred = ballot.votes_of(b"barred")
    if not barred or len(barred) + len(ballot.granted) < ballot.quorum:
        return ""
    until = clock_time(max(vote[3] for vote in barred))
    return (
        f"{len(barred)} of {ballot.total} nodes of {store} grant nothing before {until}: they are "
        "new, or were restarted, emptied, demoted or replaced and may have lost holds "
        "(loss_protection; run `holdfast init` once if they are new)"
    )


def choose_slots(ballot: Ballot, claim: Claim) -> str:
    """Return the slots to request from every node after the nodes chose different ones; empty if
    too few are free."""
    free: dict[int, int] = {}
    for vote in ballot.busy_votes():
        _count_free(free, vote[4])
    for index in ballot.granted:
        _count_free(free, ballot.maps[index])
    unseen = ballot.total - ballot.answered
    possible = [slot for slot, votes in free.items() if votes + unseen >= ballot.quorum]
    if len(possible) < claim.weight or not ballot.granted:
        return ""
    mine = {int(s) for _, slots in ballot.granted.values() for s in slots.split(",")}
    best = sorted(possible, key=lambda slot: (-free[slot], slot not in mine, slot))
    return ",".join(str(slot) for slot in sorted(best[: claim.weight]))


def _count_free(free: dict[int, int], marks: bytes) -> None:
    for slot, mark in enumerate(marks.decode()):
        if mark == "1":
            free[slot] = free.get(slot, 0) + 1
