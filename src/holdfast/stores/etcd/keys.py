"""What the entries of a client are called in etcd: few names, used again and again.

etcd steps over every key that ever was in a range until it is compacted, which many never are. If
each claim had a key of its own, a name would become slower with every hold. So the key of a claim
that has ended is used again, by a later claim of the same client, but only if nothing that was
asked on behalf of the first can still arrive.
"""

from __future__ import annotations

import os
from collections import deque

from holdfast.claim import Claim

__all__ = ["Tags"]

TAG_BYTES = 16
MOST_SPARE = 1024
MOST_RETIRED = 4096


class Tags:
    """The tags of one client. Every step is one atomic operation, so it needs no mutex."""

    def __init__(self) -> None:
        self._tags: dict[str, str] = {}
        """By owner: of the claims that may have an entry."""
        self._spare: list[str] = []
        self._lent: set[str] = set()
        self._retired: dict[str, str] = {}
        """By owner: tags that are not used again, for whoever undoes a claim once more."""
        self._order: deque[str] = deque()

    def given(self, claim: Claim) -> str:
        """The tag of a claim that is about to get an entry."""
        owner = claim.owner
        tag = self._tags.get(owner)
        if tag is None:
            tag = self._tags.setdefault(owner, self._take())
        return tag

    def _take(self) -> str:
        try:
            return self._spare.pop()
        except IndexError:
            return os.urandom(TAG_BYTES).hex()  # not the owner: who undoes it must meet nobody

    def has(self, claim: Claim) -> bool:
        """Whether its key is its own: nothing has ended it yet that was answered."""
        return claim.owner in self._tags

    def knows(self, claim: Claim) -> bool:
        """Whether it has or had one: of those that ended since they were lent, for sure."""
        return claim.owner in self._tags or claim.owner in self._retired

    def of(self, claim: Claim) -> str:
        """The tag that a claim has or had; one that nobody has, if it had none."""
        owner = claim.owner
        return self._tags.get(owner) or self._retired.get(owner, owner)

    def lend(self, claim: Claim) -> None:
        """Another thread or task is about to ask on its behalf, which may outlast the claim."""
        self._lent.add(claim.owner)

    def give_back(self, claim: Claim) -> None:
        """What was asked on its behalf has been answered."""
        self._lent.discard(claim.owner)

    def free(self, claim: Claim) -> None:
        """Its entry is gone and all that was asked for it is answered: another may have its tag."""
        # Whoever else asks on its behalf has said so before it looked the tag up.
        tag = self._tags.pop(claim.owner, None)
        if tag is None:
            return
        if claim.owner in self._lent:
            self._keep(claim.owner, tag)
        elif len(self._spare) < MOST_SPARE:
            self._spare.append(tag)

    def retire(self, claim: Claim) -> None:
        """Its entry is gone, but something may still arrive: nobody else gets its tag."""
        tag = self._tags.pop(claim.owner, None)  # of two who end it, one has it to give away
        if tag is not None:
            self._keep(claim.owner, tag)

    def _keep(self, owner: str, tag: str) -> None:
        self._retired[owner] = tag
        self._lent.discard(owner)  # whatever becomes of that, the tag is nobody's any more
        self._order.append(owner)
        if len(self._order) > MOST_RETIRED:
            self._retired.pop(self._order.popleft(), None)

    def clear(self) -> None:
        """In a forked child, where they are the parent's."""
        self._tags, self._spare, self._lent = {}, [], set()
        self._retired, self._order = {}, deque()
