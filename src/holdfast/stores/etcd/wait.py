"""Waiting on ``etcd://``: a watch of the one entry in front, and a read behind its beginning.

All waits of a backend share one WebSocket; without WebSockets each has a stream of its own. Who
waits behind another waiter is called by it (see ``etcd_leave``) and watches it only if that takes
longer: where turns are short, nothing is asked of etcd but to join, to take and to let go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.claim import Busy, Claim, Mode
from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable
from holdfast.stores.etcd import requests
from holdfast.stores.etcd.gateway import Gateway
from holdfast.stores.etcd.stream import StreamWatches
from holdfast.stores.etcd.websocket import NoWebSocket

if TYPE_CHECKING:
    from holdfast.stores.etcd.store import EtcdStore
    from holdfast.stores.etcd.watch import Watch, Watches

__all__ = ["Waits"]

RANGE = b"POST /v3/kv/range"
CALLED_SECONDS = 0.5
"""How long a waiter relies on being called before it watches the entry in front itself."""


class Waits:
    """The waits of one backend."""

    def __init__(self, store: EtcdStore, gateway: Gateway, runtime: Runtime) -> None:
        self.store, self.gateway, self.runtime = store, gateway, runtime
        self.watches = _watches(store, runtime)

    async def wait(self, claim: Claim, busy: Busy, until: float) -> bool:
        """Whether it was called, so that the name may have been handed over."""
        if busy.ref is None:
            await self.pause(until)
            return False
        front, revision, subscription = busy.ref
        if subscription and await self._called(claim, subscription, revision, until):
            return True
        await self._watch(claim, front, revision, until)
        return False

    async def _watch(
        self, claim: Claim, front: tuple[str, int], revision: int, until: float
    ) -> None:
        target, _ = front
        keys = self.store.names.of(claim.name).all.decode() if not target else f'"key":"{target}"'
        # A slot's predecessor moves on by being granted, which is a change and no end.
        ends_only = claim.mode is not Mode.SLOTS or not target
        try:
            watch = await self.confirmed(self.store.tags.of(claim), keys, ends_only, until)
            if watch is None:
                return
            try:
                if watch.began > revision and await self._changed(claim, front):
                    return
                await self.fired(watch, until)
            finally:
                await self.watches.end(watch)
        except BackendUnavailable as error:
            if isinstance(error.__cause__, NoWebSocket):
                useless, self.watches = self.watches, _streams(self.store, self.runtime)
                useless.close()
            await self.pause(until)

    async def _called(self, claim: Claim, session: str, revision: int, until: float) -> bool:
        """Whether it was called by who stands in front of it."""
        now = self.runtime.now()
        if until - now < CALLED_SECONDS:
            return False
        subscription = self.watches.hung(session) or await self._attach(session, now, until)
        if (
            subscription is None
            or subscription.began is None
            or subscription.began > revision
            or subscription.broken
        ):
            return False
        woken = await self.watches.woken(self.store.tags.of(claim), now + CALLED_SECONDS)
        return woken and not subscription.broken

    async def _attach(self, session: str, now: float, until: float) -> Watch | None:
        live = [each.id for each in self.store.sessions.all()]
        keys = f'"key":"{self.store.names.subscription(session).decode()}"'
        limit = min(until, now + self.store.settings.request_seconds)
        try:
            return await self.watches.subscription(session, keys, live, limit)
        except BackendUnavailable:  # told, or mended, by the watch that is tried next
            return None

    async def confirmed(self, owner: str, keys: str, ends_only: bool, until: float) -> Any:
        """A watch that has begun; ``None`` if the wait is over before."""
        limit = min(until, self.runtime.now() + self.store.settings.request_seconds)
        watch = await self.watches.begin(owner, keys, ends_only, limit)
        try:
            woken = await self.watches.woken(owner, limit)
        except BaseException:  # cancelled or interrupted: nobody else knows of the watch
            await self.watches.end(watch)
            raise
        if watch.began is not None and not watch.broken and not watch.fired:
            return watch
        await self.watches.end(watch)
        if not woken and limit < until:  # nothing comes any more, and nobody said so
            self.watches.distrust()
        if watch.broken or not woken:
            await self.pause(until)
        return None

    async def fired(self, watch: Any, until: float) -> None:
        """Returns when the watch has something to tell, or is broken, or was nudged."""
        await self.watches.woken(watch.owner, until)
        if watch.broken:
            await self.pause(until)

    async def _changed(self, claim: Claim, front: tuple[str, int]) -> bool:
        """Whether another attempt is worth it, by a linearizable read."""
        keys, (target, order) = self.store.names.of(claim.name), front
        if target and claim.mode is not Mode.SLOTS:  # it waits for one end, and reads no line
            body = b'{"key":"%b","keys_only":true}' % target.encode()
            found = (await self.gateway.post(RANGE, body)).get("kvs")
            return not found or int(found[0]["create_revision"]) != order
        found = await self.gateway.post(RANGE, b"{%b}" % keys.all)
        verdict = self.store.judge(claim, requests.line_of(found, keys.prefix))
        return verdict.fits or verdict.own is None or requests.place_of(verdict.front) != front

    async def pause(self, until: float) -> None:
        """Something is in the way: a short, jittered rest before the next attempt."""
        now = self.runtime.now()
        await self.runtime.sleep(max(0.0, min(until - now, self.runtime.between(0.05, 0.25))))


def _streams(store: EtcdStore, runtime: Runtime) -> Watches:
    if runtime.blocking:
        from holdfast.io.long_poll import BlockingListening

        return StreamWatches(BlockingListening(store.servers))
    from holdfast.io.long_poll_aio import AsyncListening

    return StreamWatches(AsyncListening(store.servers))


def _watches(store: EtcdStore, runtime: Runtime) -> Watches:
    if store.credentials.user:
        return _streams(store, runtime)
    if runtime.blocking:
        from holdfast.stores.etcd.watch import BlockingWatches

        return BlockingWatches(store.servers)
    from holdfast.stores.etcd.watch_aio import AsyncWatches

    return AsyncWatches(store.servers)
