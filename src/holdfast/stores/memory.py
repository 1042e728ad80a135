"""``memory://``: locks of this process. Read this backend first, after ``core.queue``: that module
has the rules of admission, and this one has no I/O.

All clients of the process with the same URL and namespace share one ``Ledger``::

    Ledger ── names ──> MemoryName ── state    a ``NameState``: holders and queue
                                   └─ record

Every operation is a few lines under one mutex. So it is atomic, as a script or a transaction is in
other stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.claim import Busy, Claim, Grant, LockInfo, Record
from holdfast.core.backoff import WATCH_POLL_SECONDS, pause_within
from holdfast.core.contract import (
    IDLE_COUNTER_SECONDS,
    QUEUE_CAP,
    Finding,
    Guarantee,
    Page,
    Renewal,
    Runtime,
    Settings,
    Signal,
    Waiting,
)
from holdfast.core.queue import MICROS, NameState
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.url import Url

__all__ = ["Ledger", "MemoryStore", "open_store"]

PURGE_SECONDS = 3600.0
LOST = "it ran out or was broken, and is no longer stored"


class MemoryName:
    """One name: its state, whose waiters are woken by signals, and its record."""

    __slots__ = ("record", "state", "used")

    def __init__(self, state: NameState[Signal]) -> None:
        self.state = state
        self.used = 0.0
        self.record: tuple[Record, float, float] | None = None


class Ledger:
    """The state of one in-process store, with its own clock, as a server has."""

    def __init__(self, now: Callable[[], float], wall: Callable[[], float]) -> None:
        self.now, self.wall = now, wall
        self.names: dict[str, MemoryName] = {}
        self.purged = now()
        self.mutex = BlockingRuntime.mutex()
        self.process = BlockingRuntime.where()[1]

    def micros(self) -> int:
        return int(self.now() * MICROS)

    def wall_micros(self) -> int:
        return int(self.wall() * MICROS)

    def wake(self, state: NameState[Signal]) -> None:
        """Wakes the waiters that a request has given a reservation."""
        for queued in state.woken:
            if queued.wake is not None:
                queued.wake.set()
        state.woken.clear()

    def purge(self, now: float) -> None:
        """Removes names that were unused for a week; the clock keeps later tokens higher."""
        if now < self.purged + PURGE_SECONDS:
            return
        self.purged = now
        for key in [k for k, n in self.names.items() if now - n.used > IDLE_COUNTER_SECONDS]:
            name = self.names[key]
            recorded = name.record is not None and name.record[2] > now
            if not name.state.holds and not name.state.queue and not recorded:
                del self.names[key]


class MemoryBackend:
    """Admits claims in a ``Ledger``."""

    def __init__(self, ledger: Ledger, display: str, runtime: Runtime) -> None:
        self.ledger, self.display, self.runtime = ledger, display, runtime

    def _name(self, key: str) -> MemoryName:
        now = self.ledger.now()
        name = self.ledger.names.get(key)
        if name is None:
            self.ledger.purge(now)
            name = self.ledger.names[key] = MemoryName(NameState(key, self.display))
        name.used = now
        return name

    def _state(self, key: str) -> tuple[NameState[Signal], int]:
        """The state of a name, and the time of the request."""
        return self._name(key).state, self.ledger.micros()

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        with self.ledger.mutex:
            state, now = self._state(claim.name)
            answer = state.attempt(claim, now, join=join, wall=self.ledger.wall_micros())
            self._prepare_wake(state, claim)
            self.ledger.wake(state)
            return answer

    def _prepare_wake(self, state: NameState[Signal], claim: Claim) -> None:
        """Gives a waiter its signal, or clears it: a wake-up from before this attempt is over."""
        queued = state.queue.get(claim.owner)
        if queued is None:
            return
        if queued.wake is None:
            queued.wake = self.runtime.signal()
        else:
            queued.wake.clear()  # not replaced: a thread may already wait for it

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        signal = self._signal(claim)
        if signal is not None:
            await self.runtime.wait(signal, until)
        elif busy.place >= QUEUE_CAP:  # not in the queue, so no release would wake it
            await self.runtime.sleep(max(0.0, until - self.runtime.now()))

    def _signal(self, claim: Claim) -> Signal | None:
        with self.ledger.mutex:
            name = self.ledger.names.get(claim.name)
            queued = name.state.queue.get(claim.owner) if name else None
            return queued.wake if queued else None

    def nudge(self, claim: Claim) -> None:
        signal = self._signal(claim)
        if signal is not None:
            signal.set()

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        with self.ledger.mutex:
            state, now = self._state(claim.name)
            queued = state.queue.get(claim.owner)
            wall = self.ledger.wall_micros()
            answer = state.exchange(grant.claim.owner, claim, now, wall=wall)
            if queued is not None and claim.owner in state.holds:
                state.woken.append(queued)  # it left the queue, where ``nudge`` would look for it
            self._prepare_wake(state, claim)
            self.ledger.wake(state)
            return answer

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
                claim = grant.claim
                state, now = self._state(claim.name)
                if not state.extend(claim.owner, claim.ttl, now, shorten=shorten):
                    lost[claim.owner] = LOST
                self.ledger.wake(state)
            for claim, behind in waits:
                state, now = self._state(claim.name)
                if not state.refresh(claim.owner, behind, now):
                    forgotten.add(claim.owner)
                self.ledger.wake(state)
        return Renewal(lost, forgotten=frozenset(forgotten))

    async def release(self, grant: Grant) -> bool:
        with self.ledger.mutex:
            state, now = self._state(grant.claim.name)
            ours = state.release(grant.claim.owner, now)
            self.ledger.wake(state)
            return ours

    async def hand_over(self, grant: Grant, *, until: float) -> Sequence[str | int] | None:
        return ()  # no hold belongs to a client

    async def take_over(self, grant: Grant, claim: Claim, *, until: float) -> Grant | None:
        with self.ledger.mutex:
            state, now = self._state(claim.name)
            owner, wall = grant.claim.owner, self.ledger.wall_micros()
            taken = state.take_over(owner, grant.token, claim, now, wall=wall)
            self.ledger.wake(state)
            return taken

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        with self.ledger.mutex:
            state, now = self._state(claim.name)
            state.abandon(claim.owner, now)
            self.ledger.wake(state)

    async def revoke(self, name: str) -> list[int]:
        with self.ledger.mutex:
            state, now = self._state(name)
            tokens = state.revoke(now)
            self.ledger.wake(state)
            return tokens

    async def look(self, name: str) -> LockInfo:
        with self.ledger.mutex:
            state, now = self._state(name)
            return state.info(now)

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        with self.ledger.mutex:
            after = cursor or ""
            keys = sorted(k for k in self.ledger.names if k.startswith(prefix) and k > after)
            now = self.ledger.micros()
            infos = [self.ledger.names[key].state.info(now) for key in keys[:limit]]
        used = [info for info in infos if info.holders or info.waiters]
        return Page(used, keys[limit - 1] if len(keys) > limit else None)

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        with self.ledger.mutex:
            name, now = self._name(grant.claim.name), self.ledger.now()
            if not name.state.is_held_by(grant.claim.owner, self.ledger.micros()):
                return False
            name.record = (Record(value, grant.token, 0.0), now, now + keep_seconds)
            return True

    async def recall(self, name: str) -> Record | None:
        with self.ledger.mutex:
            stored, now = self._name(name).record, self.ledger.now()
            if stored is None or stored[2] <= now:
                return None
            record, written, _ = stored
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
