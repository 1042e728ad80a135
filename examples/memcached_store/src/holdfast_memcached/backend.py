"""The store and its backend: all state of a name is one item, changed by compare-and-swap.

memcached pushes nothing, so waiters attempt again a few times per second. It forgets all when
it restarts, so nothing is granted until the holds of before are over (the quarantine). Its clock is
a timer, so a hold lasts ``SKEW_SECONDS`` longer in the store than for its holder, and nothing is
granted while the server's clock and ours disagree (``MemcachedStore.check``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from holdfast_memcached.item import key_of, read_item, write_request

T = TypeVar("T")
Decide = Callable[[NameState[None], Reading], T]
"""Changes a state and returns the answer to a request."""

SKEW_SECONDS = 2 * CLOCK_SECONDS
"""How much longer a hold lasts in the store: its end was counted from a clock that was late by
``CLOCK_SECONDS``, and by as much again before ``check`` would have noticed."""
LONGEST_SECONDS = 86_400.0
CHANGES = 100
"""Most retries of a compare-and-swap."""
KEYS = b"lru_crawler metadump hash\r\n"
_NOT_KEPT = {Guarantee.SURVIVES_SERVER_LOSS, Guarantee.RECORDS, Guarantee.WATCH}


class MemcachedStore:
    """One server, and what is known about its clock."""

    guarantees = frozenset(Guarantee) - _NOT_KEPT
    shortest_ttl, whole_seconds = 1.0, False

    def __init__(self, endpoint: MemcachedEndpoint, settings: Settings, quarantine: float) -> None:
        self.endpoint, self.settings, self.display = endpoint, settings, endpoint.display
        self.longest_ttl = quarantine - SKEW_SECONDS if quarantine else LONGEST_SECONDS
        self.quarantine_seconds, self._distrusted_until = quarantine, 0.0
        self._last: Reading | None = None

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


class MemcachedBackend:
    """Admits claims in the items of one namespace."""

    def __init__(self, store: MemcachedStore, runtime: Runtime) -> None:
        self.store, self.runtime, self.display = store, runtime, store.display
        self.pool = new_pool(store.endpoint, store.settings.connections, blocking=runtime.blocking)
        self._hub, self._between = new_hub(blocking=runtime.blocking), runtime.between

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        def decide(state: NameState[None], at: Reading) -> Grant | Busy:
            left = self.store.quarantine_seconds - at.uptime
            if left <= 0:
                return state.attempt(claim, at.micros, join=join, wall=at.micros)
            return Busy(0, left, reason=f"{self.display} has forgotten all holds at its start")

        self._hub.forget(claim.owner)
        return await self._change(claim.name, decide, until, ends=True)

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        pause = backoff.pause_within(until - now(), backoff.STORE_POLL_SECONDS, self._between)
        await self._hub.waited(claim.owner, now() + pause)

    def nudge(self, claim: Claim) -> None:
        self._hub.wake(claim.owner)

    async def renew(
        self, grants: Sequence[Grant], waits: Sequence[Waiting], *, until: float,
        shorten: bool = False,
    ) -> Renewal:  # fmt: skip
        def decide(state: NameState[None], at: Reading) -> bool:
            if isinstance(each, Waiting):
                return state.refresh(each.claim.owner, each.behind, at.micros)
            return state.extend(each.claim.owner, each.claim.ttl, at.micros, shorten=shorten)

        gone, unknown, work = set[str](), dict[str, str](), list[Grant | Waiting]([*grants, *waits])
        for each in work:
            try:
                if not await self._change(each.claim.name, decide, until, ends=True):
                    gone.add(each.claim.owner)
            except (BackendUnavailable, Incompatible) as error:
                unknown[each.claim.owner] = str(error)
        lost = {g.claim.owner: "it ran out or was broken" for g in grants if g.claim.owner in gone}
        return Renewal(lost, unknown, frozenset(gone - lost.keys()))

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
        until = now() + self.store.endpoint.request_seconds
        # The server lists all of its keys, for one client at a time.
        while type(found := (await self.pool.alone([KEYS], until))[0]) is not list:
            if not found.startswith(b"BUSY") or now() >= until:
                raise BackendUnavailable(f"{self.display} does not list its keys: {found!r:.200}")
            await self.runtime.sleep(self._between(*backoff.SHORT_RACE_SECONDS))
        ours, after = key_of(self.store.settings.namespace), (cursor or "").encode()
        keys = sorted(key for key, _ in found if key.startswith(ours) and key > after)
        # The namespace alone is no key of an item: a request without keys would be an error.
        reply, at = await self._ask(b" ".join([b"gets", ours, *keys[:limit]]) + b"\r\n", until)
        infos = [read_item(data, self.display).info(at.micros) for _, data in reply]
        used = [i for i in infos if i.name.startswith(prefix) and (i.holders or i.waiters)]
        return Page(used, keys[limit - 1].decode() if len(keys) > limit else None)

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        raise Unsupported(f"{self.display} keeps no records: memcached forgets")

    async def recall(self, name: str) -> Record | None:
        raise Unsupported(f"{self.display} keeps no records: memcached forgets")

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = backoff.pause_within(until - now(), backoff.WATCH_POLL_SECONDS, self._between)
        await self.runtime.sleep(pause)

    async def probe(self) -> list[Finding]:
        await self._ask(b"version\r\n")
        seconds = self.store.quarantine_seconds
        after = f"nothing is granted for {seconds:g} s" if seconds else "holds may be granted twice"
        memory = Finding("memory", "it evicts nothing (-M, no_slab_reassign), and can't flush (-F)")
        return [memory, Finding("restart", f"{after} then", "ok" if seconds else "warning")]

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
        key = key_of(self.store.settings.namespace, name)
        for times in range(CHANGES):
            reply, before = await self._ask(b"gets %b\r\n" % key, until)
            if ends:
                self.store.check(before)
            version, data = reply[0] if reply else (b"", b"")
            state = read_item(data, self.display) if data else NameState(name, self.display)
            state.skew = int(SKEW_SECONDS * MICROS)
            answer = decide(state, before)
            if not state.changed:
                return answer
            reply, after = await self._ask(write_request(key, version, state), until)
            if ends:
                self.store.check(after, before)
            if reply == b"STORED":
                return answer
            if reply not in (b"EXISTS", b"NOT_FOUND", b"NOT_STORED"):  # not overtaken
                raise BackendUnavailable(f"{self.display} refused to write: {reply!r:.200}")
            await self.runtime.sleep(self._between(0.0, min(0.25, 0.0005 * times**2)))
        raise BackendUnavailable(f"{self.display}: other clients change {name!r} too often")

    async def _ask(self, request: bytes, until: float | None = None) -> tuple[Any, Reading]:
        """Sends a request, and asks the server for its clock behind it."""
        sent = now()
        reply, stats = await self.pool.requests([request, STATS], until)
        found = dict(stats) if type(stats) is list else {}
        words = found.get(b"time", b""), found.get(b"uptime", b"")
        if not all(map(bytes.isdigit, words)) or (type(reply) is bytes) == (request[:4] == b"gets"):
            raise BackendUnavailable(f"{self.display} answers strangely: {reply!r:.200}")
        return reply, Reading(sent, now(), *map(int, words))
