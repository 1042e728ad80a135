"""Waiting on ``consul://``: blocking queries on the one entry in front.

A query names the index of what was read, so nothing that happened since is missed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from holdfast.claim import Busy, Claim, Mode
from holdfast.core.contract import Runtime
from holdfast.core.ordered import Entry, Verdict
from holdfast.errors import BackendUnavailable
from holdfast.io.http import Reply
from holdfast.stores._consensus.strict import is_list_of
from holdfast.stores.consul import requests
from holdfast.stores.consul.orphans import RETRY_SECONDS

if TYPE_CHECKING:
    from holdfast.io.long_poll import Listening
    from holdfast.stores.consul.store import ConsulStore

__all__ = ["Waits"]


class Waits:
    """The waits of one backend."""

    def __init__(self, store: ConsulStore, runtime: Runtime) -> None:
        self.store, self.runtime = store, runtime
        self.listening = _listening(store, runtime)

    def stand(
        self, claim: Claim, own: Entry, verdict: Verdict, line: list[Entry], retry: float | None
    ) -> Busy:
        """Remembers what a claim waits for, and says it."""
        from holdfast.stores.consul.store import Place

        ahead = [entry for entry in line if entry.order < own.order]
        if any(not entry.session for entry in ahead):  # nobody tells when a lock-delay is over
            retry = RETRY_SECONDS if retry is None else min(retry, RETRY_SECONDS)
        if claim.mode is Mode.SHARED:
            ahead = [entry for entry in ahead if entry.mode is not Mode.SHARED]
        front, said = tuple(entry.key for entry in ahead), own.details
        place = Place(own.order, own.changed, said.since, said.behind, front)
        self.store.places[claim.owner] = place
        if claim.mode is not Mode.SLOTS:
            last = ahead[-1]
            return Busy(verdict.place, retry, (last.key, last.changed, (), ""))
        # A slot's predecessor moves on by being let in; without one, any holder's end counts.
        keys = self.store.names.of(claim.name)
        target = next((entry for entry in ahead if entry.key == verdict.target), None)
        held = tuple(entry.key for entry in ahead if entry.held)
        gone = held if target is None else (target.key,)
        come = "" if target is None else keys.mark(target.owner).decode()
        return Busy(verdict.place, retry, (keys.prefix, 0, gone, come))

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        if busy.ref is None:  # nothing tells when that is over
            await self.pause(until, 0.3, 0.6)
            return
        path, index, gone, come = busy.ref
        try:
            while index is not None:
                reply = await self.listen(claim.owner, path, index, until, keys=bool(gone))
                index = None if reply is None else _goes_on(reply, index, gone, come)
        except BackendUnavailable:
            await self.pause(until)

    async def listen(
        self, owner: str, path: str, index: int, until: float, *, keys: bool
    ) -> Reply | None:
        """One blocking query; ``None`` when the wait is over without an answer."""
        left = until - self.runtime.now()
        if left <= 0:
            return None
        # Consul adds up to a sixteenth; the answer must come while somebody listens.
        line = requests.query(path, index, int(left * 900), keys=keys)
        limit = min(until, self.runtime.now() + self.store.settings.request_seconds)
        call = await self.listening.begin(owner, line, b"", limit)
        if call is None:  # too many wait already: look again by ourselves
            await self.pause(until, 0.3, 0.6)
            return None
        try:
            await self.listening.woken(owner, until)
        finally:
            self.listening.end(call)
        if call.broken:
            await self.pause(until)
        return call.reply

    async def pause(self, until: float, low: float = 0.05, high: float = 0.25) -> None:
        """Something is in the way: a short, jittered rest before the next attempt."""
        now = self.runtime.now()
        await self.runtime.sleep(max(0.0, min(until - now, self.runtime.between(low, high))))


def _goes_on(reply: Reply, index: int, gone: tuple[str, ...], come: str) -> int | None:
    """The index to go on listening with, or ``None`` if another attempt is worth it: the key
    that was listened to, or one that must go, has gone, or the one that must come has come."""
    if reply.status != 200 or (not gone and b'"Session"' not in reply.body):  # see consul_remains
        return None
    if gone:
        there = _listed(reply.body)
        if come in there or not there.issuperset(gone):
            return None
    # Consul may start its indexes anew; the query has to start over then.
    return reply.seen if reply.seen >= index else 0


def _listed(body: bytes) -> frozenset[str]:
    """The keys of a listing; none, if it is something else: the attempt that follows tells."""
    try:
        keys = json.loads(body)
    except (ValueError, RecursionError):
        keys = []
    return frozenset(keys) if is_list_of(str)(keys) else frozenset()


def _listening(store: ConsulStore, runtime: Runtime) -> Listening:
    if runtime.blocking:
        from holdfast.io.long_poll import BlockingListening

        return BlockingListening(store.servers)
    from holdfast.io.long_poll_aio import AsyncListening

    return AsyncListening(store.servers)
