"""What a Redlock client makes of votes that came to nothing: errors, or when to come again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.claim import Busy, Claim
from holdfast.core import admit
from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable
from holdfast.stores.redis.replies import clock_time, damage, refusal
from holdfast.stores.redlock.nodes import heard
from holdfast.stores.redlock.votes import Ballot, ready_after

__all__ = ["SPLIT_SECONDS", "busy", "check_round", "rearranged"]

SPLIT_SECONDS = (0.0005, 0.01)
"""When to come again after nobody won: each at a moment of its own."""

YOUNG_SECONDS = (0.02, 0.08)
"""When to look again at a hold so young that it may not last."""


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
