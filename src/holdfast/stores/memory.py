"""``memory://``: locks of this process. Read this backend first: it has the rules, and no I/O.

All clients of the process with the same URL and namespace share one ``Ledger``::

    Ledger ── names ──> Name ── token, record
                         ├── holds  {owner: Held}     in order of their grants
                         └── queue  {owner: Queued}   in order of arrival

Every operation is a few lines under one mutex. So it is atomic, as a script or a transaction is in
other stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.claim import Busy, Claim, Grant, Holder, LockInfo, Mode, Record, Waiter, read_label
from holdfast.core import admit
from holdfast.core.admit import Share
from holdfast.core.backoff import WATCH_POLL_SECONDS, pause_within
from holdfast.core.contract import (
    GRACE_SECONDS,
    IDLE_COUNTER_SECONDS,
    QUEUE_CAP,
    STALE_SECONDS,
    Finding,
    Guarantee,
    Page,
    Renewal,
    Runtime,
    Settings,
    Signal,
    Waiting,
)
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.url import Url

__all__ = ["Ledger", "MemoryStore", "open_store"]

PURGE_SECONDS = 3600.0


class MemoryHold:
    """One hold."""

    __slots__ = ("ends", "grant", "share", "since")

    def __init__(self, grant: Grant, since: float, ends: float) -> None:
        self.grant, self.since, self.ends = grant, since, ends
        self.share = Share(grant.claim.mode, grant.claim.weight, grant.slots)


class Queued:
    """One entry of the queue."""

    __slots__ = ("behind", "claim", "refreshed", "reserved_until", "share", "signal", "since")

    def __init__(self, claim: Claim, signal: Signal, now: float, wall: float) -> None:
        self.claim, self.signal, self.refreshed, self.since = claim, signal, now, wall
        self.share = Share(claim.mode, claim.weight)
        self.behind = 0
        self.reserved_until: float | None = None

    def stale(self, now: float) -> bool:
        """Whether to skip it: it was not refreshed, or was woken and did not attempt in time."""
        reservation_over = self.reserved_until is not None and now > self.reserved_until
        return reservation_over or now > self.refreshed + STALE_SECONDS


class Name:
    """The state of one name."""

    def __init__(self) -> None:
        self.token = 0
        self.used = 0.0
        self.holds: dict[str, MemoryHold] = {}
        self.queue: dict[str, Queued] = {}
        self.record: tuple[Record, float, float] | None = None

    def ahead_of(self, owner: str) -> list[Queued]:
        """The entries in front of this owner; all entries if it is not in the queue."""
        ahead = []
        for queued in self.queue.values():
            if queued.claim.owner == owner:
                break
            ahead.append(queued)
        return ahead


class Ledger:
    """The state of one in-process store, with its own clock, as a server has."""

    def __init__(self, now: Callable[[], float], wall: Callable[[], float]) -> None:
        self.now, self.wall = now, wall
        self.names: dict[str, Name] = {}
        self.purged = now()
        self.mutex = BlockingRuntime.mutex()
        self.process = BlockingRuntime.where()[1]

    def tidy(self, name: Name, now: float) -> None:
        """Ends expired holds, removes stale entries, and wakes the waiters that now fit."""
        for owner in [owner for owner, held in name.holds.items() if held.ends <= now]:
            del name.holds[owner]
        for owner in [owner for owner, queued in name.queue.items() if queued.stale(now)]:
            del name.queue[owner]
        taken = [held.share for held in name.holds.values()]
        for queued in name.queue.values():
            claim = queued.claim
            if not admit.fits(claim.mode, claim.weight, claim.limit, taken):
                break
            if queued.reserved_until is None:
                queued.reserved_until = now + GRACE_SECONDS
                queued.signal.set()
            taken.append(queued.share)

    def grant(self, name: Name, claim: Claim, now: float) -> Grant:
        """Grants the claim, with a token above every earlier one, also after a purge."""
        name.queue.pop(claim.owner, None)
        name.token = max(name.token + 1, int(self.wall() * 1_000_000))
        slots: tuple[int, ...] = ()
        if claim.mode is Mode.SLOTS:
            shares = (held.share for held in name.holds.values())
            slots = admit.free_slots(claim.weight, claim.limit, shares)
        grant = Grant(claim, name.token, slots)
        name.holds[claim.owner] = MemoryHold(grant, self.wall(), now + claim.ttl)
        return grant

    def purge(self, now: float) -> None:
        """Removes names that were unused for a week; the clock keeps later tokens higher."""
        if now < self.purged + PURGE_SECONDS:
            return
        self.purged = now
        for key in [k for k, n in self.names.items() if now - n.used > IDLE_COUNTER_SECONDS]:
            name = self.names[key]
            recorded = name.record is not None and name.record[2] > now
            if not name.holds and not name.queue and not recorded:
                del self.names[key]


class MemoryBackend:
    """Admits claims in a ``Ledger``."""

    def __init__(self, ledger: Ledger, display: str, runtime: Runtime) -> None:
        self.ledger, self.display, self.runtime = ledger, display, runtime

    def _name(self, key: str) -> tuple[Name, float]:
        now = self.ledger.now()
        name = self.ledger.names.get(key)
        if name is None:
            self.ledger.purge(now)
            name = self.ledger.names[key] = Name()
        name.used = now
        self.ledger.tidy(name, now)
        return name, now

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        with self.ledger.mutex:
            return self._attempt(claim, join)

    def _attempt(self, claim: Claim, join: bool) -> Grant | Busy:
        name, now = self._name(claim.name)
        held = name.holds.get(claim.owner)
        if held is not None:  # a retry whose first answer was lost
            held.ends = max(held.ends, now + claim.ttl)
            return held.grant
        others = [held.grant.claim for held in name.holds.values()]
        others += [queued.claim for owner, queued in name.queue.items() if owner != claim.owner]
        if others:
            slots = others[0].mode is Mode.SLOTS
            admit.check_limit(claim, others[0].limit, slots=slots, store=self.display)
        ahead = name.ahead_of(claim.owner)
        taken = [held.share for held in name.holds.values()] + [queued.share for queued in ahead]
        if admit.fits(claim.mode, claim.weight, claim.limit, taken):
            return self.ledger.grant(name, claim, now)
        return self._busy(name, claim, len(ahead), now, join)

    def _busy(self, name: Name, claim: Claim, place: int, now: float, join: bool) -> Busy:
        if join and claim.owner not in name.queue:
            if len(name.queue) >= QUEUE_CAP:
                return Busy(
                    place, 1.0, reason=f"the queue of {claim.name!r} is full ({QUEUE_CAP} waiters)"
                )
            signal = self.runtime.signal()
            name.queue[claim.owner] = Queued(claim, signal, now, self.ledger.wall())
        elif queued := name.queue.get(claim.owner):
            queued.refreshed = now
            queued.reserved_until = None
            queued.signal.clear()  # not replaced: a thread may already wait for it
        ends = [held.ends for held in name.holds.values()]
        ends += [q.reserved_until for q in name.queue.values() if q.reserved_until is not None]
        return Busy(place, max(0.0, min(ends) - now) if ends else None)

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        with self.ledger.mutex:
            name = self.ledger.names.get(claim.name)
            queued = name.queue.get(claim.owner) if name else None
        if queued is not None:
            await self.runtime.wait(queued.signal, until)
        elif busy.place >= QUEUE_CAP:  # not in the queue, so no release would wake it
            await self.runtime.sleep(max(0.0, until - self.runtime.now()))

    def nudge(self, claim: Claim) -> None:
        with self.ledger.mutex:
            name = self.ledger.names.get(claim.name)
            queued = name.queue.get(claim.owner) if name else None
        if queued is not None:
            queued.signal.set()

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        with self.ledger.mutex:
            return self._release(grant), self._attempt(claim, join=True)

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        lost: dict[str, str] = {}
        forgotten: set[str] = set()
        with self.ledger.mutex:
            for grant in grants:
                name, now = self._name(grant.claim.name)
                held = name.holds.get(grant.claim.owner)
                if held is None:
                    lost[grant.claim.owner] = "it expired or was broken, and is no longer stored"
                else:
                    ends = now + grant.claim.ttl
                    held.ends = ends if shorten else max(held.ends, ends)
            for claim, behind in waits:
                name, now = self._name(claim.name)
                queued = name.queue.get(claim.owner)
                if queued is None:
                    forgotten.add(claim.owner)
                else:
                    queued.refreshed, queued.behind = now, behind
        return Renewal(lost, forgotten=frozenset(forgotten))

    async def release(self, grant: Grant) -> bool:
        with self.ledger.mutex:
            return self._release(grant)

    def _release(self, grant: Grant) -> bool:
        name, now = self._name(grant.claim.name)
        was_ours = name.holds.pop(grant.claim.owner, None) is not None
        self.ledger.tidy(name, now)
        return was_ours

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        with self.ledger.mutex:
            name, now = self._name(claim.name)
            name.holds.pop(claim.owner, None)
            name.queue.pop(claim.owner, None)
            self.ledger.tidy(name, now)

    async def revoke(self, name: str) -> list[int]:
        with self.ledger.mutex:
            state, now = self._name(name)
            tokens = [held.grant.token for held in state.holds.values()]
            state.holds.clear()
            self.ledger.tidy(state, now)
            return tokens

    async def look(self, name: str) -> LockInfo:
        with self.ledger.mutex:
            return self._info(name)

    def _info(self, key: str) -> LockInfo:
        name, now = self._name(key)
        holders = tuple(
            Holder(
                *read_label(held.grant.claim.label),
                held.grant.claim.mode,
                held.grant.token,
                held.grant.slots,
                held.since,
                held.ends - now,
            )
            for held in name.holds.values()
        )
        waiters = tuple(
            Waiter(*read_label(q.claim.label), q.claim.mode, q.since, q.behind)
            for q in name.queue.values()
        )
        claims = [h.grant.claim for h in name.holds.values()] + [
            q.claim for q in name.queue.values()
        ]
        return LockInfo(key, claims[0].limit if claims else 0, holders, waiters)

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        with self.ledger.mutex:
            after = cursor or ""
            keys = sorted(k for k in self.ledger.names if k.startswith(prefix) and k > after)
            infos = [self._info(key) for key in keys[:limit]]
        used = [info for info in infos if info.holders or info.waiters]
        return Page(used, keys[limit - 1] if len(keys) > limit else None)

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        with self.ledger.mutex:
            name, now = self._name(grant.claim.name)
            if grant.claim.owner not in name.holds:
                return False
            name.record = (Record(value, grant.token, 0.0), now, now + keep_seconds)
            return True

    async def recall(self, name: str) -> Record | None:
        with self.ledger.mutex:
            state, now = self._name(name)
            if state.record is None or state.record[2] <= now:
                return None
            record, written, _ = state.record
            return record._replace(age_seconds=now - written)

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        left = until - self.runtime.now()
        await self.runtime.sleep(pause_within(left, WATCH_POLL_SECONDS, self.runtime.between))

    async def probe(self) -> list[Finding]:
        return [Finding("memory", "locks of this process only; they end with it")]

    def forget(self) -> None:
        if self.ledger.process == self.runtime.where()[1]:
            return  # another event loop, not another process: the holds of other clients stay
        self.ledger.process = self.runtime.where()[1]
        self.ledger.mutex = BlockingRuntime.mutex()  # the one of the parent may be locked for ever
        self.ledger.names.clear()

    async def close(self) -> None:
        pass


class MemoryStore:
    """One ledger, which all clients with the same URL and namespace share."""

    guarantees = frozenset(
        {
            Guarantee.EXCLUSIVE,
            Guarantee.SHARED,
            Guarantee.SLOTS,
            Guarantee.FIFO,
            Guarantee.FENCED,
            Guarantee.RECORDS,
        }
    )
    shortest_ttl = 0.05
    longest_ttl = float("inf")
    whole_seconds = False

    def __init__(self, ledger: Ledger, display: str = "memory://") -> None:
        self.ledger, self.display = ledger, display

    def backend(self, runtime: Runtime) -> MemoryBackend:
        return MemoryBackend(self.ledger, self.display, runtime)


class _Key(NamedTuple):
    url: str
    namespace: str


_ledgers: dict[_Key, Ledger] = {}


def open_store(url: Url, settings: Settings) -> MemoryStore:
    """``memory://`` or ``memory://any-name``."""
    url.refuse_unknown()
    key = _Key(str(url), settings.namespace)
    ledger = _ledgers.setdefault(key, Ledger(BlockingRuntime.now, BlockingRuntime.wall))
    return MemoryStore(ledger, str(url))
