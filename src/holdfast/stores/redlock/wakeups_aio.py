"""Wake-ups for asyncio Redlock backends: see ``redlock_bell``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.single_flight import SingleFlight, look_by
from holdfast.io.wakeups import AsyncWakeupHub
from holdfast.stores.redis.aio import Wired
from holdfast.stores.redis.connection import INCOMPLETE, Access, Reader, pack
from holdfast.stores.redlock.nodes import CONNECT_SECONDS, Fleet, Node
from holdfast.stores.redlock.wakeups import Listeners

__all__ = ["AsyncNameWakeups"]


class AsyncNameSubscription(Wired):
    """A subscribed connection that calls as messages come in."""

    def __init__(
        self,
        node: Node,
        heard: Callable[[Any], None],
        lost: Callable[[AsyncNameSubscription], None],
    ) -> None:
        self.node, self._heard = node, heard
        self._lost: Callable[[AsyncNameSubscription], None] | None = lost
        reader = Reader()
        self._feed, self._gets = reader.feed, reader.gets

    def send(self, word: str, channel: str) -> None:
        self._transport.write(pack(word, channel))

    def data_received(self, data: bytes) -> None:
        try:
            self._feed(data)
            while (reply := self._gets()) is not INCOMPLETE:
                self._heard(reply)
        except ConnectionError:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lost is not None:
            self._lost(self)

    @property
    def closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._lost = None
        self._transport.abort()


class AsyncNameWakeups:
    """Waits of many tasks for many names."""

    def __init__(self, access: Access, fleet: Fleet) -> None:
        self._access, self._fleet = access, fleet
        self._listeners = Listeners()
        self._hub = AsyncWakeupHub()
        self._single_flight = SingleFlight()
        self._subscription: AsyncNameSubscription | None = None
        self._closed = False

    def listens(self, channel: str, index: int) -> bool:
        """Whether this backend is among those whom that node counts as listening."""
        subscription = self._subscription
        return (
            subscription is not None
            and subscription.node is self._fleet.nodes[index]
            and self._listeners.is_known(channel)
        )

    def calls(self, channel: str) -> int:
        """How often those who wait there have been called."""
        return self._listeners.calls(channel)

    async def wait(self, channel: str, key: str, until: float) -> None:
        """Returns when the name may be had, or by ``until``; the first time as soon as nothing
        can be missed any more."""
        new = self._listeners.join(channel, key)
        subscription = self._subscription
        if subscription is not None and subscription.node.down:
            self._drop()
        if self._subscription is None:
            await self._open(until)
        subscription = self._subscription
        if subscription is not None and not self._listeners.is_known(channel):
            self._listeners.asked(channel)
            subscription.send("SUBSCRIBE", channel)
        if new and self._listeners.is_live(channel):
            return
        if await self._hub.wait(key, until if subscription is not None else look_by(until)):
            await asyncio.sleep(max(0.0, min(self._listeners.pause(channel), until - now())))

    async def _open(self, until: float) -> None:
        """Listens to a node, unless another one is about to."""
        place = self._single_flight.begin()
        if place is None:
            return
        began = now()
        try:
            if not await self._attach(until):
                # The next attempt says what is wrong; until then nobody spins.
                self._single_flight.failed(began)
                return
        finally:
            self._single_flight.end(place)
        self._hub.wake_all()  # those who look for themselves need not any more

    async def _attach(self, until: float) -> bool:
        for node in self._fleet.nodes:
            if node.down or now() >= until:
                continue
            subscription = AsyncNameSubscription(node, self._heard, self._lost)
            try:
                await subscription.wire(self._access, node.address, now() + CONNECT_SECONDS)
            except BackendUnavailable as error:
                node.failed(error)
                continue
            if self._closed:
                subscription.close()
                return True
            if not subscription.closing:
                self._subscription = subscription
                return True
        return False

    def _heard(self, message: Any) -> None:
        if type(message) is list:
            for key in self._listeners.heard(message):
                self._hub.wake(key)

    def _lost(self, subscription: AsyncNameSubscription) -> None:
        if self._subscription is subscription:
            # Everybody attempts again and subscribes anew, a moment later: the node may be back.
            self._subscription, keys = None, self._listeners.forget_all()
            asyncio.get_running_loop().call_later(random.uniform(0.01, 0.1), self._wake, keys)

    def _wake(self, keys: list[str]) -> None:
        for key in keys:
            self._hub.wake(key)

    def _drop(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()
        self._wake(self._listeners.forget_all())

    def leave(self, channel: str, key: str) -> None:
        """The claim waits no more."""
        empty = self._listeners.leave(channel, key)
        self._hub.forget(key)
        if empty and self._subscription is not None and not self._subscription.closing:
            self._subscription.send("UNSUBSCRIBE", channel)

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def forget(self) -> None:
        if self._subscription is not None:
            self._subscription.forget()

    async def close(self) -> None:
        self._closed = True
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()
        self._hub.wake_all()
