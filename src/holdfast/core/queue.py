"""Admission as a pure state machine: the holders and the queue of one name. No I/O and no clock.

A ``NameState`` takes one request at a time, with the time at which it runs, and gives the answer::

    NameState ── token                  the last one that was given
       ├── holds  {owner: HeldClaim}    in order of their grants
       ├── queue  {owner: QueuedClaim}  in order of arrival
       ├── woken  [QueuedClaim]         the waiters to wake, once the state is stored
       └── changed                      whether there is anything to store

Every request first drops what is over, then does its work, then reserves the name for the first
waiters that fit now. ``stores.memory`` keeps such states in memory, ``stores.mysql`` in rows. Every
other store has the same rules in a language of its own; the suite compares each of them with this
module, step by step (``holdfast.testing.admission``).

Times are whole microseconds, so that a state can be stored without rounding.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Generic, TypeVar

from holdfast.claim import (
    Busy,
    Claim,
    Grant,
    Holder,
    LockInfo,
    Mode,
    Waiter,
    read_holds,
    read_label,
)
from holdfast.core import admit
from holdfast.core.admit import Share
from holdfast.core.contract import GRACE_SECONDS, QUEUE_CAP, STALE_SECONDS

__all__ = ["MICROS", "HeldClaim", "NameState", "QueuedClaim"]

W = TypeVar("W")

MICROS = 1_000_000
FULL_QUEUE_RETRY_SECONDS = 1.0


def micros(seconds: float) -> int:
    """Seconds as whole microseconds."""
    return int(seconds * MICROS)


class HeldClaim:
    """A hold, until its end."""

    __slots__ = ("claim", "ends", "share", "since", "slots", "token")

    def __init__(
        self, claim: Claim, token: int, slots: tuple[int, ...], since: int, ends: int
    ) -> None:
        self.claim, self.token, self.slots = claim, token, slots
        self.since, self.ends = since, ends
        self.share = Share(claim.mode, claim.weight, slots)


class QueuedClaim(Generic[W]):
    """A waiter. It is skipped unless it is refreshed before ``ends``, and unless it attempts before
    its reservation is over."""

    __slots__ = ("behind", "claim", "ends", "reserved", "share", "since", "wake")

    def __init__(self, claim: Claim, since: int, ends: int) -> None:
        self.claim, self.since, self.ends = claim, since, ends
        self.share = Share(claim.mode, claim.weight)
        self.reserved = 0
        """The end of its reservation; 0 if it has none."""
        self.behind = 0
        self.wake: W | None = None
        """The store's own: how this waiter is woken."""

    def is_over(self, now: int) -> bool:
        return self.ends <= now or 0 < self.reserved < now


class NameState(Generic[W]):
    """The holders and the queue of one name."""

    __slots__ = ("changed", "holds", "name", "queue", "skew", "store", "token", "woken")

    def __init__(self, name: str, store: str, token: int = 0) -> None:
        self.name, self.store, self.token = name, store, token
        self.holds: dict[str, HeldClaim] = {}
        self.queue: dict[str, QueuedClaim[W]] = {}
        self.skew = 0
        """How much later than its end a hold is over: the clock that gave the end may be behind."""
        self.changed = False
        self.woken: list[QueuedClaim[W]] = []
        """The waiters that were given a reservation since the store last emptied this list."""

    def attempt(self, claim: Claim, now: int, *, join: bool, wall: int) -> Grant | Busy:
        """Grants the claim if it fits beside the holders and the waiters ahead of it; else it joins
        the queue, if ``join``. ``wall`` is the time of day: no token is below it.

        Raises ``LimitMismatch`` if the name is in use with another limit, or as another kind."""
        self._drop_expired(now)
        self._check_limit(claim)
        return self._admit(claim, now, join, wall)

    def exchange(
        self, owner: str, claim: Claim, now: int, *, wall: int
    ) -> tuple[bool, Grant | Busy]:
        """``release`` of one owner's hold and ``attempt`` of a claim that joins, in one. Ends
        nothing if it raises ``LimitMismatch``."""
        self._drop_expired(now)
        self._check_limit(claim, without=owner)
        ours = self._end(owner)
        return ours, self._admit(claim, now, True, wall)

    def take_over(
        self, owner: str, token: int, claim: Claim, now: int, *, wall: int
    ) -> Grant | None:
        """Gives the hold with this owner and token to the owner of ``claim``, with a new token and
        in its place. ``None`` if there is no such hold. A claim that has it already gets the same
        grant again, renewed."""
        self._drop_expired(now)
        held = self.holds.get(claim.owner) or self._hand_to(claim, owner, token, wall)
        if held is not None:
            return self._renewed(held, claim, now)
        self._reserve(now)
        return None

    def _hand_to(self, claim: Claim, owner: str, token: int, wall: int) -> HeldClaim | None:
        old = self.holds.get(owner)
        if old is None or old.token != token or old.claim[:4] != claim[:4]:
            return None
        taken = HeldClaim(claim, self._next_token(wall), old.slots, wall, old.ends)
        holds = [taken if held is old else held for held in self.holds.values()]
        self.holds = {held.claim.owner: held for held in holds}
        return taken

    def release(self, owner: str, now: int) -> bool:
        """Ends the owner's hold. False if it has none."""
        self._drop_expired(now)
        ours = self._end(owner)
        self._reserve(now)
        return ours

    def abandon(self, owner: str, now: int) -> None:
        """Removes the owner's hold or its entry of the queue."""
        self._drop_expired(now)
        if not self._end(owner) and self.queue.pop(owner, None) is not None:
            self.changed = True
        self._reserve(now)

    def revoke(self, now: int) -> list[int]:
        """Ends all holds. Returns their tokens."""
        self._drop_expired(now)
        tokens = [held.token for held in self.holds.values()]
        if tokens:
            self.holds.clear()
            self.changed = True
        self._reserve(now)
        return tokens

    def extend(self, owner: str, ttl: float, now: int, *, shorten: bool = False) -> bool:
        """Renews the owner's hold. False if it has none. A later end stays, unless ``shorten``:
        requests may arrive out of order."""
        self._drop_expired(now)
        held = self.holds.get(owner)
        if held is not None:
            self._extend(held, now + micros(ttl), shorten)
        self._reserve(now)
        return held is not None

    def refresh(self, owner: str, behind: int, now: int) -> bool:
        """Keeps a waiter in the queue for another ``STALE_SECONDS``. False if it is no longer
        there. ``behind`` is how many waiters of its client are behind it."""
        self._drop_expired(now)
        queued = self.queue.get(owner)
        if queued is not None:
            queued.ends, queued.behind = now + micros(STALE_SECONDS), behind
            self.changed = True
        self._reserve(now)
        return queued is not None

    def skip(self, wakes: Container[W | None], now: int) -> None:
        """Removes the waiters that can't be woken any more."""
        self._drop_expired(now)
        for owner in [owner for owner, queued in self.queue.items() if queued.wake in wakes]:
            del self.queue[owner]
            self.changed = True
        self._reserve(now)

    def is_held_by(self, owner: str, now: int) -> bool:
        """Whether the owner holds the name. Changes nothing."""
        held = self.holds.get(owner)
        return held is not None and not self._is_over(held, now)

    def info(self, now: int) -> LockInfo:
        """Holders and waiters, for ``inspect`` and ``list``. Changes nothing."""
        held = [held for held in self.holds.values() if not self._is_over(held, now)]
        queued = [queued for queued in self.queue.values() if not queued.is_over(now)]
        holders = tuple(
            Holder(
                *read_label(h.claim.label), h.claim.mode, h.token, h.slots, h.since / MICROS,
                max(0, h.ends - now) / MICROS,
            )
            for h in held
        )  # fmt: skip
        waiters = tuple(
            Waiter(
                *read_label(q.claim.label), q.claim.mode, q.since / MICROS, q.behind,
                read_holds(q.claim.label),
            )
            for q in queued
        )  # fmt: skip
        claims = [each.claim for each in held] + [each.claim for each in queued]
        return LockInfo(self.name, claims[0].limit if claims else 0, holders, waiters)

    def _is_over(self, held: HeldClaim, now: int) -> bool:
        return held.ends <= now - self.skew

    def _drop_expired(self, now: int) -> None:
        """Ends expired holds, and skips waiters that were not refreshed or have not come."""
        for owner in [owner for owner, held in self.holds.items() if self._is_over(held, now)]:
            del self.holds[owner]
            self.changed = True
        for owner in [owner for owner, queued in self.queue.items() if queued.is_over(now)]:
            del self.queue[owner]
            self.changed = True

    def _end(self, owner: str) -> bool:
        ended = self.holds.pop(owner, None) is not None
        self.changed = self.changed or ended
        return ended

    def _extend(self, held: HeldClaim, ends: int, shorten: bool) -> None:
        held.ends = ends if shorten else max(held.ends, ends)
        self.changed = True

    def _taken(self) -> list[Share]:
        return [held.share for held in self.holds.values()]

    def _ahead_of(self, owner: str) -> list[Share]:
        """The waiters in front of this owner; all waiters if it is not in the queue."""
        ahead: list[Share] = []
        for queued in self.queue.values():
            if queued.claim.owner == owner:
                break
            ahead.append(queued.share)
        return ahead

    def _admit(self, claim: Claim, now: int, join: bool, wall: int) -> Grant | Busy:
        held = self.holds.get(claim.owner)
        if held is not None:  # a retry whose first answer was lost
            return self._renewed(held, claim, now)
        ahead = self._ahead_of(claim.owner)
        if admit.fits(claim.mode, claim.weight, claim.limit, self._taken() + ahead):
            return self._grant(claim, now, wall)
        reason = self._wait(claim, now, join, wall)
        self._reserve(now)
        retry = FULL_QUEUE_RETRY_SECONDS if reason else self._soonest_end(now)
        return Busy(len(ahead), retry, reason=reason)

    def _renewed(self, held: HeldClaim, claim: Claim, now: int) -> Grant:
        """The grant that a hold has, for its whole ttl."""
        self._extend(held, now + micros(claim.ttl), shorten=False)
        self._reserve(now)
        return Grant(claim, held.token, held.slots)

    def _claims(self) -> Iterator[Claim]:
        for held in self.holds.values():
            yield held.claim
        for queued in self.queue.values():
            yield queued.claim

    def _check_limit(self, claim: Claim, without: str = "") -> None:
        """Compares the claim with the first other one; all of them have the same limit."""
        for other in self._claims():
            if other.owner not in (claim.owner, without):
                slots = other.mode is Mode.SLOTS
                admit.check_limit(claim, other.limit, slots=slots, store=self.store)
                return

    def _grant(self, claim: Claim, now: int, wall: int) -> Grant:
        token = self._next_token(wall)
        slots: tuple[int, ...] = ()
        if claim.mode is Mode.SLOTS:
            slots = admit.free_slots(claim.weight, claim.limit, self._taken())
        self.queue.pop(claim.owner, None)
        ends = now + micros(claim.ttl)
        self.holds[claim.owner] = HeldClaim(claim, token, slots, wall, ends)
        self.changed = True
        self._reserve(now)
        return Grant(claim, token, slots)

    def _next_token(self, wall: int) -> int:
        """A token is above every earlier one, also after the state of an unused name was purged."""
        self.token = max(self.token + 1, wall)
        return self.token

    def _wait(self, claim: Claim, now: int, join: bool, wall: int) -> str:
        """Refreshes the entry of a claim, or adds one if ``join``. Returns why it can't."""
        queued = self.queue.get(claim.owner)
        if queued is None:
            if not join:
                return ""
            if len(self.queue) >= QUEUE_CAP:
                return f"the queue of {claim.name!r} is full ({QUEUE_CAP} waiters)"
            queued = self.queue[claim.owner] = QueuedClaim(claim, wall, now)
        queued.ends, queued.reserved = now + micros(STALE_SECONDS), 0
        self.changed = True
        return ""

    def _soonest_end(self, now: int) -> float | None:
        """Seconds until the first hold or reservation ends."""
        ends = [held.ends for held in self.holds.values()]
        ends += [queued.reserved for queued in self.queue.values() if queued.reserved]
        return max(0, min(ends) + self.skew - now) / MICROS if ends else None

    def _reserve(self, now: int) -> None:
        """Reserves the name for the first waiters that fit now: they are to be woken."""
        if not self.queue:
            return
        taken = self._taken()
        for queued in self.queue.values():
            claim = queued.claim
            if not admit.fits(claim.mode, claim.weight, claim.limit, taken):
                return
            if not queued.reserved:
                queued.reserved = now + micros(GRACE_SECONDS)
                self.woken.append(queued)
                self.changed = True
            taken.append(queued.share)
