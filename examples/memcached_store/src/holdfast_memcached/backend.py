"""The store and its backend: all state of a name is one item, changed by compare-and-swap.

memcached pushes nothing, so waiters attempt again a few times per second. It forgets all when
it restarts, so nothing is granted until the holds of before are over (the quarantine). Its clock is
a timer, so a hold lasts ``SKEW_SECONDS`` longer in the store than for its holder, and nothing is
granted while the server's clock and ours disagree (``MemcachedStore.check``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from holdfast.claim import Busy, Claim, Grant, LockInfo, Record
from holdfast.core import backoff
from holdfast.core.contract import Finding, Guarantee, Page, Renewal, Runtime, Settings, Waiting
from holdfast.core.queue import MICROS, NameState
from holdfast.errors import BackendUnavailable, Incompatible, Unsupported
from holdfast.io.blocking import new_pool
from holdfast.io.clock import now
from holdfast.io.wakeups import new_hub
from holdfast_memcached.connection import CLOCK_SECONDS, STATS, MemcachedEndpoint, Reading
from holdfast_memcached.item import key_of, read_item, write_item

__all__ = ["MemcachedBackend", "MemcachedStore"]

T = TypeVar("T")
Decide = Callable[[NameState[None], Reading], T]
"""Changes a state and returns the answer to a request."""

SKEW_SECONDS = 2 * CLOCK_SECONDS
"""How much longer a hold lasts in the store: its end was counted from a clock that was late by
``CLOCK_SECONDS``, and by as much again before ``check`` would have noticed."""
LONGEST_SECONDS = 86_400.0
EXPIRY_SECONDS = 2 * 86_400
"""How long an unused item is kept: no hold is longer, and the clock keeps later tokens higher."""
CHANGES = 100
"""Most retries of a compare-and-swap."""
LOST = "it ran out or was broken, and is no longer stored"
_OVERTAKEN = (b"EXISTS", b"NOT_FOUND", b"NOT_STORED")
_NOT_KEPT = {Guarantee.SURVIVES_SERVER_LOSS, Guarantee.RECORDS, Guarantee.WATCH}


class MemcachedStore:
    """One server, and what is known about its clock."""

    guarantees = frozenset(Guarantee) - _NOT_KEPT
    shortest_ttl = 1.0
    whole_seconds = False

    def __init__(self, endpoint: MemcachedEndpoint, settings: Settings, quarantine: float) -> None:
        self.endpoint, self.settings, self.display = endpoint, settings, endpoint.display
        self.longest_ttl = quarantine - SKEW_SECONDS if quarantine else LONGEST_SECONDS
        self.quarantine_seconds = quarantine
        self._last: Reading | None = None
        self._distrusted_until = 0.0

    def backend(self, runtime: Runtime) -> MemcachedBackend:
        return MemcachedBackend(self, runtime)

    def check(self, reading: Reading, earlier: Reading | None = None) -> None:
        """Raises ``BackendUnavailable`` unless the end of a hold may be counted from a reading: the
        server's clock went on like ours since the earlier reading."""
        earlier = earlier or self._last or reading
        if not reading.agrees(earlier):
            self._last, self._distrusted_until = None, now() + CLOCK_SECONDS
        elif now() >= self._distrusted_until:
            self._last = reading
            return
        raise BackendUnavailable(f"{self.display} was stopped or restarted: its clock has jumped")


def _extend(claim: Claim, shorten: bool, state: NameState[None], at: Reading) -> bool:
    return state.extend(claim.owner, claim.ttl, at.micros, shorten=shorten)


def _refresh(waiting: Waiting, state: NameState[None], at: Reading) -> bool:
    return state.refresh(waiting.claim.owner, waiting.behind, at.micros)


class MemcachedBackend:
    """Admits claims in the items of one namespace."""

    def __init__(self, store: MemcachedStore, runtime: Runtime) -> None:
        self.store, self.runtime, self.display = store, runtime, store.display
        connections = store.settings.connections
        self.pool = new_pool(store.endpoint, connections, blocking=runtime.blocking)
        self._hub = new_hub(blocking=runtime.blocking)

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        def decide(state: NameState[None], at: Reading) -> Grant | Busy:
            left = self.store.quarantine_seconds - at.uptime
            if left <= 0:
                return state.attempt(claim, at.micros, join=join, wall=at.micros)
            why = f"{self.display} has started {at.uptime} s ago and forgotten all holds"
            return Busy(0, left, reason=f"{why}: nothing is granted until they are over")

        self._hub.forget(claim.owner)
        return await self._change(claim.name, decide, until, ends=True)

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        left, seconds = until - now(), backoff.STORE_POLL_SECONDS
        pause = backoff.pause_within(left, seconds, self.runtime.between)
        await self._hub.waited(claim.owner, now() + pause)

    def nudge(self, claim: Claim) -> None:
        self._hub.wake(claim.owner)

    async def renew(
        self, grants: Sequence[Grant], waits: Sequence[Waiting], *, until: float,
        shorten: bool = False,
    ) -> Renewal:  # fmt: skip
        work = [(grant.claim, partial(_extend, grant.claim, shorten)) for grant in grants]
        work += [(waiting.claim, partial(_refresh, waiting)) for waiting in waits]
        missing, unknown = set(), {}
        for claim, decide in work:
            try:
                if not await self._change(claim.name, decide, until, ends=True):
                    missing.add(claim.owner)
            except (BackendUnavailable, Incompatible) as error:
                unknown[claim.owner] = str(error)
        waiting_owners = {waiting.claim.owner for waiting in waits}
        lost = dict.fromkeys(missing - waiting_owners, LOST)
        return Renewal(lost, unknown, frozenset(missing & waiting_owners))

    async def release(self, grant: Grant) -> bool:
        owner = grant.claim.owner
        return await self._change(grant.claim.name, lambda s, at: s.release(owner, at.micros))

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        def decide(state: NameState[None], at: Reading) -> None:
            state.abandon(claim.owner, at.micros)
            state.changed = True  # written in any case: then no earlier request can be, any more

        await self._change(claim.name, decide, until)

    async def revoke(self, name: str) -> list[int]:
        return await self._change(name, lambda state, at: state.revoke(at.micros))

    async def look(self, name: str) -> LockInfo:
        return await self._change(name, lambda state, at: state.info(at.micros))

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        ours, after = key_of(self.store.settings.namespace), (cursor or "").encode()
        keys = sorted(key for key in await self._keys() if key.startswith(ours) and key > after)
        # The namespace alone is no key of an item: a request without keys would be an error.
        reply, at = await self._ask(b" ".join([b"gets", ours, *keys[:limit]]) + b"\r\n")
        infos = [read_item(data, self.display).info(at.micros) for _, data in reply]
        used = [i for i in infos if i.name.startswith(prefix) and (i.holders or i.waiters)]
        return Page(used, keys[limit - 1].decode() if len(keys) > limit else None)

    async def _keys(self) -> list[bytes]:
        """All keys of the server, which lists them for one client at a time."""
        until = now() + self.store.endpoint.request_seconds
        while True:
            (reply,) = await self.pool.alone([b"lru_crawler metadump hash\r\n"], until)
            if type(reply) is list:
                return [key for key, _ in reply]
            if not reply.startswith(b"BUSY") or now() >= until:
                raise BackendUnavailable(f"{self.display} does not list its keys: {reply!r:.200}")
            await self.runtime.sleep(self.runtime.between(*backoff.SHORT_RACE_SECONDS))

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        raise Unsupported(f"{self.display} keeps no records: memcached forgets")

    async def recall(self, name: str) -> Record | None:
        raise Unsupported(f"{self.display} keeps no records: memcached forgets")

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        left, seconds = until - now(), backoff.WATCH_POLL_SECONDS
        await self.runtime.sleep(backoff.pause_within(left, seconds, self.runtime.between))

    async def probe(self) -> list[Finding]:
        await self._ask(b"version\r\n")
        seconds = self.store.quarantine_seconds
        after = f"nothing is granted for {seconds:g} s" if seconds else "they may be granted twice"
        restart = f"it forgets all holds when it restarts: {after}"
        memory = Finding("memory", "it evicts nothing (-M, no_slab_reassign), and can't flush (-F)")
        return [memory, Finding("restart", restart, "ok" if seconds else "warning")]

    def forget(self) -> None:
        self.pool.forget()
        self._hub.discard()
        self._hub = new_hub(blocking=self.runtime.blocking)

    async def close(self) -> None:
        self._hub.close()
        self.pool.close()

    async def _change(
        self, name: str, decide: Decide[T], until: float | None = None, *, ends: bool = False
    ) -> T:
        """Compare-and-swap: reads the item, lets ``decide`` change the state, and writes it; again
        if another client has changed it. Returns the result of the last ``decide``.

        With ``ends``, the end of a hold is counted from the reading. It is checked, and once more
        after the write: the clock of a server that was stopped is right by then, and a server that
        has restarted in between is found out."""
        latest = now() + self.store.endpoint.request_seconds
        until = latest if until is None else min(until, latest)
        for times in range(CHANGES):
            state, version, before = await self._read(name, until)
            if ends:
                self.store.check(before)
            answer = decide(state, before)
            if not state.changed:
                return answer
            reply, after = await self._write(name, state, version, until)
            if ends:
                self.store.check(after, before)
            if reply == b"STORED":
                return answer
            if reply not in _OVERTAKEN:
                raise BackendUnavailable(f"{self.display} refused to write: {reply!r:.200}")
            await self.runtime.sleep(self.runtime.between(0.0, min(0.25, 0.0005 * times**2)))
        raise BackendUnavailable(f"{self.display}: other clients change {name!r} too often")

    async def _read(self, name: str, until: float) -> tuple[NameState[None], bytes, Reading]:
        """The state of a name, the version of its item (empty if there is none), and the time."""
        key = key_of(self.store.settings.namespace, name)
        reply, at = await self._ask(b"gets %b\r\n" % key, until)
        version, state = b"", NameState[None](name, self.display)
        if reply:
            version, state = reply[0][0], read_item(reply[0][1], self.display)
        state.skew = int(SKEW_SECONDS * MICROS)
        return state, version, at

    async def _write(
        self, name: str, state: NameState[None], version: bytes, until: float
    ) -> tuple[bytes, Reading]:
        """Writes a state, unless its item has changed since it was read; returns the reply."""
        verb, key = b"cas" if version else b"add", key_of(self.store.settings.namespace, name)
        data = write_item(state)
        words = (verb, key, EXPIRY_SECONDS, len(data), version, data)
        return await self._ask(b"%b %b 0 %d %d %b\r\n%b\r\n" % words, until)

    async def _ask(self, request: bytes, until: float | None = None) -> tuple[Any, Reading]:
        """Sends a request, and asks the server for its clock behind it."""
        sent = now()
        reply, stats = await self.pool.requests([request, STATS], until)
        found = dict(stats) if type(stats) is list else {}
        words = found.get(b"time", b""), found.get(b"uptime", b"")
        if not all(map(bytes.isdigit, words)) or (type(reply) is bytes) == (request[:4] == b"gets"):
            raise BackendUnavailable(
                f"{self.display} does not answer like memcached: {reply!r:.99}"
            )
        return reply, Reading(sent, now(), *map(int, words))
