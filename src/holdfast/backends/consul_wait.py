"""Waiting on ``consul://``: blocking queries on the one entry in front.

A query names the index of what was read, so nothing that happened since is missed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from holdfast.backends import consul_requests as requests
from holdfast.claim import Busy, Claim
from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable
from holdfast.wires.http import Reply

if TYPE_CHECKING:
    from holdfast.backends.consul import ConsulStore
    from holdfast.wires.http_listen import Listening

__all__ = ["Waits"]


class Waits:
    """The waits of one backend."""

    def __init__(self, store: ConsulStore, runtime: Runtime) -> None:
        self.store, self.runtime = store, runtime
        self.listening = _listening(store, runtime)

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        if busy.ref is None:
            await self.pause(until)
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
            await self.listening.rung(owner, until)
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
    if reply.status != 200:
        return None
    if gone:
        there = set(json.loads(reply.body))
        if come in there or not there.issuperset(gone):
            return None
    # Consul may start its indexes anew; the query has to start over then.
    return reply.seen if reply.seen >= index else 0


def _listening(store: ConsulStore, runtime: Runtime) -> Listening:
    if runtime.blocking:
        from holdfast.wires.http_listen import BlockingListening

        return BlockingListening(store.servers)
    from holdfast.wires.http_listen_async import AsyncListening

    return AsyncListening(store.servers)
