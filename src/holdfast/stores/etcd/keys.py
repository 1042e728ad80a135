"""The pool of keys that one client uses for its entries in etcd: few keys, used again and again.

etcd steps over every key that ever existed in a range until the range is compacted, and many
clusters never compact. If each claim had a new key, a name would become slower with every hold. So
the key of an ended claim is recycled for a later claim of the same client, but only if no request
on behalf of the first claim can still arrive.

What the pool hands out is the key's last segment, the key id.
"""

from __future__ import annotations

import os
from collections import deque

from holdfast.claim import Claim

__all__ = ["KeyPool"]

KEY_ID_BYTES = 16
MOST_RECYCLED = 1024
MOST_QUARANTINED = 4096


class KeyPool:
    """The key ids of one client. Every step is one atomic operation, so there is no mutex."""

    def __init__(self) -> None:
        self._allocated: dict[str, str] = {}
        """By owner: key ids of claims that may have an entry."""
        self._recycled: list[str] = []
        self._pinned: set[str] = set()
        """Owners for which another thread or task sends requests."""
        self._quarantined: dict[str, str] = {}
        """By owner: key ids that are never used again. A second undo of the claim needs them."""
        self._quarantine_order: deque[str] = deque()

    def allocate(self, claim: Claim) -> str:
        """Returns the key id of a claim that is about to get an entry; a new one if it has none."""
        owner = claim.owner
        key_id = self._allocated.get(owner)
        if key_id is None:
            key_id = self._allocated.setdefault(owner, self._unused())
        return key_id

    def adopt(self, claim: Claim, key_id: str) -> None:
        """The claim has taken over an entry with this key id, and keeps the key."""
        self._allocated[claim.owner] = key_id

    def _unused(self) -> str:
        try:
            return self._recycled.pop()
        except IndexError:
            # Random, and not the owner: `of` returns the owner for a claim without a key, and an
            # undo of such a claim must not delete an entry.
            return os.urandom(KEY_ID_BYTES).hex()

    def is_allocated(self, claim: Claim) -> bool:
        """True until an answered request has ended the claim: the key is the claim's own."""
        return claim.owner in self._allocated

    def is_known(self, claim: Claim) -> bool:
        """True if the claim has or had a key. Reliable for claims that ended while pinned; a
        recycled key is forgotten."""
        return claim.owner in self._allocated or claim.owner in self._quarantined

    def of(self, claim: Claim) -> str:
        """Returns the key id that a claim has or had; without one, an id that no entry has."""
        owner = claim.owner
        return self._allocated.get(owner) or self._quarantined.get(owner, owner)

    def pin(self, claim: Claim) -> None:
        """Keeps the key from being recycled: another thread or task is about to send a request on
        behalf of the claim, and that request may outlast the claim."""
        self._pinned.add(claim.owner)

    def unpin(self, claim: Claim) -> None:
        """Every request that was sent on behalf of the claim is answered."""
        self._pinned.discard(claim.owner)

    def recycle(self, claim: Claim) -> None:
        """Frees the key for another claim: the entry is gone and every request is answered."""
        # A thread that sends on behalf of the claim has pinned it before it looked up the key id.
        key_id = self._allocated.pop(claim.owner, None)
        if key_id is None:
            return
        if claim.owner in self._pinned:
            self._quarantine(claim.owner, key_id)
        elif len(self._recycled) < MOST_RECYCLED:
            self._recycled.append(key_id)

    def quarantine(self, claim: Claim) -> None:
        """Withdraws the key for good: the entry is gone, but a request may still arrive."""
        # The pop is atomic: of two threads that end the claim, one gets the key id.
        key_id = self._allocated.pop(claim.owner, None)
        if key_id is not None:
            self._quarantine(claim.owner, key_id)

    def _quarantine(self, owner: str, key_id: str) -> None:
        self._quarantined[owner] = key_id
        self._pinned.discard(owner)  # a quarantined key needs no pin
        self._quarantine_order.append(owner)
        if len(self._quarantine_order) > MOST_QUARANTINED:
            self._quarantined.pop(self._quarantine_order.popleft(), None)

    def clear(self) -> None:
        """Forgets all keys: in a forked child they belong to the parent."""
        self._allocated, self._recycled, self._pinned = {}, [], set()
        self._quarantined, self._quarantine_order = {}, deque()
